"""backfill: turns a range of a DAG's schedule into runs, a few at a time, alongside the schedule and with lower priority.

Users create, pause, unpause and cancel it; the leader advances it. A backfill that cannot be planned ends alone (V11).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import backfills, schedules, shards
from evertick.db.queries.backfills import BackfillRow, ExistingRun
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.gates import awaits_past
from evertick.domain.dags.validation import check_run_params, check_run_type
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.schedules.preview import (
    MOST_PARALLEL,
    Reprocess,
    count_fires,
    fires_between,
    last_fires_between,
    next_batch,
)
from evertick.domain.schedules.run_partitions import Partition, backfill_of, keys_at, partition_at, partition_date
from evertick.domain.schedules.spec import ScheduleSpec
from evertick.engine.fire_schedules import UNPLANNABLE, CpuLimitExceeded, cpu_limit, read_spec, spec_json
from evertick.engine.runs import find_dag
from evertick.engine.verbs import is_poison, leader_verb, require

# How many instants one step reads. Usually only a few of them can start; newest first, finding each takes about
# twenty times as long.
BATCH, NEWEST_FIRST_BATCH = 200, 50
PLAN_SECONDS = 1.0
SAMPLE = 5
# The most existing runs that a preview counts.
_MOST_COMPARED = 10_000
_TICK = timedelta(microseconds=1)
# As many as a schedule can list.
MOST_KEYED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillRequest:
    """A requested backfill. `schedule` names one of the DAG's; `spec` is an ad-hoc schedule instead. `accepts_unknown`: its runs
    also receive parameters that the DAG does not declare. `partitions`: the keys of those that get a run, instead of a range; the
    range of a schedule with partitions is one of their dates."""

    dag: str
    first: datetime
    last: datetime | None
    partitions: tuple[str, ...] = ()
    schedule: str | None = None
    spec: ScheduleSpec | None = None
    reprocess: Reprocess = Reprocess.NONE
    newest_first: bool = False
    parallel: int = 1
    params: Mapping[str, object] | None = None
    accepts_unknown: bool = False


# The states of a newest run that is repeated.
_REPEATED = {
    Reprocess.NONE: (),
    Reprocess.FAILED: ("failed", "canceled"),
    Reprocess.ALL: ("success", "failed", "canceled"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPlan:
    """The preview of a backfill. `existing`: how many instants have a run now, by the state of the newest; None if they are too
    many to compare. `sample` are the first instants in its order that it would run, or only the first ones if they are too many."""

    dag_id: int
    schedule_id: int | None
    schedule: str | None
    spec: ScheduleSpec
    params: Mapping[str, object]
    first: datetime
    last: datetime
    total: int
    sample: tuple[datetime, ...]
    existing: Mapping[str, int] | None

    def new_runs(self, reprocess: Reprocess) -> int | None:
        """How many runs it would create if nothing changed meanwhile."""
        if self.existing is None:
            return self.total if reprocess is Reprocess.ALL else None
        return self.total - sum(count for state, count in self.existing.items() if state not in _REPEATED[reprocess])


@dataclass(frozen=True, slots=True)
class Created:
    id: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Advanced:
    made: int
    ended: int
    moved: bool
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillStep:
    """`instants`: those after `position`, in the order of the backfill; `is_all`: there are no more. `keys` and `dates`: their
    partitions, if they have any."""

    position: datetime | None
    instants: list[datetime]
    is_all: bool
    keys: list[str] | None = None
    dates: list[datetime | None] | None = None


@dataclass(frozen=True, slots=True)
class CanceledRuns:
    """Both are None if the backfill was already over."""

    runs: int | None
    asked: int | None


@sql_function
async def create_backfill(conn: AsyncConnection, *, plan: dict[str, object], request: str, actor: Actor) -> Created: ...


@leader_verb
async def advance_backfill(
    conn: AsyncConnection, step: BackfillStep, *, shard: int, epoch: int, backfill_id: int
) -> Advanced: ...


@leader_verb
async def fail_backfill(conn: AsyncConnection, *, shard: int, epoch: int, backfill_id: int, reason: str) -> bool: ...


@sql_function
async def pause_backfill(conn: AsyncConnection, *, backfill_id: int, paused: bool, actor: Actor) -> bool: ...


@sql_function
async def cancel_backfill(
    conn: AsyncConnection, *, backfill_id: int, leaves_runs: bool, actor: Actor
) -> CanceledRuns: ...


async def preview(conn: AsyncConnection, wish: BackfillRequest) -> BackfillPlan:
    """Validate a requested backfill and preview it. Changes nothing."""
    if not 1 <= wish.parallel <= MOST_PARALLEL:
        raise UserError(f"{wish.parallel} runs at once is not allowed: use a number from 1 to {MOST_PARALLEL}.")
    row, dag_spec = await find_dag(conn, wish.dag)
    check_run_type(dag_spec, "backfill")
    now = await shards.read_clock(conn)
    schedule_id, name, spec, params = await _when(conn, wish)
    if wish.partitions:
        # Instants that have just passed, one for each.
        spec = _keyed(spec, wish, now)
        wish = replace(wish, first=spec.instants[0], last=spec.instants[-1])
    elif spec is not None:
        spec = backfill_of(spec)
    assert spec is not None, "without partitions there is a schedule"
    last = now if wish.last is None else wish.last
    _check_range(wish, last, now)
    if wish.newest_first and (tasks := [task.name for task in dag_spec.tasks if awaits_past(task.gates)]):
        raise UserError(
            f"DAG {wish.dag!r} cannot be backfilled newest first: {tasks[0]!r} has depends_on_past, so each run waits for the"
            " previous one. Omit --newest-first."
        )
    total = count_fires(spec, wish.first, last)
    if total == 0:
        raise UserError(
            f"The schedule does not fire from {wish.first.isoformat()} to {last.isoformat()}. Preview its fires with: evertick"
            f" schedules simulate {wish.dag}"
        )
    found: list[ExistingRun] | None = None
    if total > _MOST_COMPARED:
        sample = _in_order(wish, spec, last, SAMPLE)
    else:
        instants = fires_between(spec, wish.first, last, _MOST_COMPARED)
        keys, _ = _partitions(spec, instants)
        found = await backfills.existing(conn, dag_id=row.dag_id, schedule_id=schedule_id, instants=instants, keys=keys)
        kept = {each.instant for each in found if each.state not in _REPEATED[wish.reprocess]}
        needed = [each for each in instants if each not in kept]
        sample = needed[: -SAMPLE - 1 : -1] if wish.newest_first else needed[:SAMPLE]
    return BackfillPlan(
        dag_id=row.dag_id,
        schedule_id=schedule_id,
        schedule=name,
        spec=spec,
        params=check_run_params(dag_spec, {**params, **(wish.params or {})}, accepts_unknown=wish.accepts_unknown),
        first=wish.first,
        last=last,
        total=total,
        sample=tuple(sample),
        existing=None if found is None else Counter(each.state for each in found),
    )


def _check_range(wish: BackfillRequest, last: datetime, now: datetime) -> None:
    if wish.first > now:
        raise UserError(
            f"The range begins at {wish.first.isoformat()}, in the future: the schedule itself fires those instants."
            " Choose an earlier --from."
        )
    if last > now:
        raise UserError(
            f"The range ends at {last.isoformat()}, in the future: the schedule itself fires those instants."
            " Omit --to for now."
        )
    if last < wish.first:
        raise UserError(
            f"The range ends at {last.isoformat()}, before it begins at {wish.first.isoformat()}: swap them."
        )


def _keyed(spec: ScheduleSpec | None, wish: BackfillRequest, now: datetime) -> ScheduleSpec:
    if len(wish.partitions) > MOST_KEYED:
        raise UserError(f"A backfill takes at most {MOST_KEYED:,} partitions by name, not {len(wish.partitions):,}.")
    if spec is not None:
        for key in wish.partitions:
            partition_date(spec, key)
    return keys_at(wish.partitions, now - len(wish.partitions) * _TICK)


def _partitions(
    spec: ScheduleSpec, instants: Sequence[datetime]
) -> tuple[list[str], list[datetime | None]] | tuple[None, None]:
    """The partitions of these instants: their keys and dates."""
    if spec.partitions is None:
        return None, None
    found = [partition_at(spec, each) for each in instants]
    return [each.key for each in found], [each.date for each in found]


def _in_order(wish: BackfillRequest, spec: ScheduleSpec, last: datetime, limit: int) -> list[datetime]:
    find = last_fires_between if wish.newest_first else fires_between
    return find(spec, wish.first, last, limit)


async def instants_of(
    conn: AsyncConnection, wish: BackfillRequest, *, limit: int
) -> tuple[list[tuple[datetime, Partition | None]], int]:
    """The instants of a backfill with their partitions, in its order, up to a limit; and their number. Changes nothing."""
    outlook = await preview(conn, wish)
    found = _in_order(wish, outlook.spec, outlook.last, limit)
    is_keyed = outlook.spec.partitions is not None
    return [(each, partition_at(outlook.spec, each) if is_keyed else None) for each in found], outlook.total


async def create(
    conn: AsyncConnection, wish: BackfillRequest, *, request: str, actor: Actor
) -> tuple[Created, BackfillPlan]:
    """Create the backfill; the leader starts it. Repeating a request returns the same backfill; with other arguments it fails."""
    outlook = await preview(conn, wish)
    plan: dict[str, object] = {
        "dag_id": outlook.dag_id,
        "schedule_id": outlook.schedule_id,
        "spec": spec_json(outlook.spec),
        "params": outlook.params,
        "first_at": outlook.first.isoformat(),
        "last_at": outlook.last.isoformat(),
        "reprocess": wish.reprocess,
        "newest_first": wish.newest_first,
        "parallel": wish.parallel,
        "total": outlook.total,
    }
    made = await create_backfill(conn, plan=plan, request=request, actor=actor)
    if made.id is None:
        raise NotFound(f"DAG {wish.dag!r} was deleted while its backfill was being created. Publish it again first.")
    row = None if made.is_new else await backfills.find(conn, made.id)
    if row is not None and not _is_same(row, wish, outlook):
        raise Conflict(f"Key {request!r} belongs to another backfill: choose another key.")
    return made, outlook


def _is_same(row: BackfillRow, wish: BackfillRequest, outlook: BackfillPlan) -> bool:
    """Whether the earlier request had the same arguments. An omitted end may have moved since."""
    said = {"dag": wish.dag, "first_at": wish.first, "reprocess": wish.reprocess, "newest_first": wish.newest_first}
    said |= {"last_at": wish.last} if wish.last is not None else {}
    said |= {"schedule": wish.schedule} if wish.schedule is not None else {}
    said |= {"spec": spec_json(wish.spec)} if wish.spec is not None else {}
    given = {name: outlook.params[name] for name in wish.params or ()}
    is_told = all(getattr(row, name) == value for name, value in said.items())
    return is_told and all(row.params.get(name) == value for name, value in given.items())


async def advance(conn: AsyncConnection, *, shard: int, epoch: int, backfill_id: int) -> Advanced:
    """One step by the leader: count what ended, and create as many runs as the limit allows."""
    found = await backfills.position(conn, backfill_id=backfill_id)
    over = Advanced(made=0, ended=0, moved=False, is_over=True)
    if found is None:
        return over
    instants: tuple[datetime, ...] = ()
    is_all = False
    keys: list[str] | None = None
    dates: list[datetime | None] | None = None
    try:
        if found.is_planning:
            with cpu_limit(PLAN_SECONDS):
                batch = next_batch(
                    read_spec(found.spec),
                    first=found.first_at,
                    last=found.last_at,
                    position=found.position,
                    newest_first=found.newest_first,
                    most=NEWEST_FIRST_BATCH if found.newest_first else BATCH,
                )
                keys, dates = _partitions(read_spec(found.spec), batch.instants)
            instants, is_all = batch.instants, batch.is_all
        step = BackfillStep(position=found.position, instants=list(instants), is_all=is_all, keys=keys, dates=dates)
        return await advance_backfill(conn, step, shard=shard, epoch=epoch, backfill_id=backfill_id)
    except psycopg.Error as error:
        if not is_poison(error.sqlstate):
            raise
        reason = f"PostgreSQL rejected its next run: {error}"
    except (*UNPLANNABLE, CpuLimitExceeded) as error:
        reason = f"{type(error).__name__}: {error}"
    reason = reason.replace("\x00", "")
    await fail_backfill(conn, shard=shard, epoch=epoch, backfill_id=backfill_id, reason=reason)
    return over


async def pause(conn: AsyncConnection, *, backfill_id: int, actor: Actor) -> BackfillRow:
    """It creates no more runs; the open ones continue."""
    return await _change(conn, backfill_id, paused=True, actor=actor)


async def unpause(conn: AsyncConnection, *, backfill_id: int, actor: Actor) -> BackfillRow:
    return await _change(conn, backfill_id, paused=False, actor=actor)


async def cancel(conn: AsyncConnection, *, backfill_id: int, leaves_runs: bool, actor: Actor) -> CanceledRuns:
    """It creates no more runs, and its open ones are canceled unless `leaves_runs`."""
    done = await cancel_backfill(conn, backfill_id=backfill_id, leaves_runs=leaves_runs, actor=actor)
    if done.runs is None:
        row = await find_backfill(conn, backfill_id)
        raise Conflict(f"Backfill {backfill_id} of {row.dag} is over ({row.state}); there is nothing to cancel.")
    return done


async def find_backfill(conn: AsyncConnection, backfill_id: int) -> BackfillRow:
    return require(await backfills.find(conn, backfill_id), "backfill", backfill_id)


async def _change(conn: AsyncConnection, backfill_id: int, *, paused: bool, actor: Actor) -> BackfillRow:
    is_done = await pause_backfill(conn, backfill_id=backfill_id, paused=paused, actor=actor)
    row = await find_backfill(conn, backfill_id)
    if not is_done:
        verb = "pause" if paused else "unpause"
        raise Conflict(f"Backfill {backfill_id} of {row.dag} is {row.state}: there is nothing to {verb}.")
    return row


async def _when(
    conn: AsyncConnection, wish: BackfillRequest
) -> tuple[int | None, str | None, ScheduleSpec | None, Mapping[str, object]]:
    """The schedule's id, name and params, or none of these for an ad-hoc schedule."""
    if wish.spec is not None:
        return None, None, wish.spec, {}
    known = await schedules.of_dag(conn, dag=wish.dag)
    names = ", ".join(each.name for each in known)
    found = [each for each in known if wish.schedule in (None, each.name)]
    if not known and wish.partitions:
        return None, None, None, {}
    if not known:
        raise UserError(f"{wish.dag} has no schedule: set the instants with --cron or --every.")
    if not found:
        raise UserError(f"{wish.dag} has no schedule {wish.schedule!r}. It has: {names}.")
    if len(found) > 1:
        raise UserError(f"{wish.dag} has several schedules: choose one with --schedule. It has: {names}.")
    one = found[0]
    try:
        return one.schedule_id, one.name, read_spec(one.spec), one.params
    except UNPLANNABLE as error:
        raise UserError(f"Schedule {one.name!r} of {wish.dag} cannot be decoded: {error}") from None
