"""Changes of schedules: put, pause, unpause, delete and reset, each with its preview of missed fires.

A change is planned from what was read, and applied only if the cursors are unchanged. Cycles of DAGs that start each
other are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import TypeVar

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import schedules, shards
from evertick.db.queries.schedules import DagSchedule, DependencyWait
from evertick.db.statements import retry_on_deadlock, sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.dags.validation import check_run_params
from evertick.domain.errors import Conflict, CyclicDependency, InvalidSchedule, NotFound
from evertick.domain.schedules.computed import renewed
from evertick.domain.schedules.dependencies import Condition, Source, find_loop, read_text
from evertick.domain.schedules.misfire import (
    LONGEST_WINDOW_SECONDS,
    MOST_MISSED,
    MisfirePolicy,
    SkipRange,
    SkipReason,
    delay_of,
    skip_until,
)
from evertick.domain.schedules.spec import EARLIEST, ScheduleKind, ScheduleSpec, next_after
from evertick.domain.schedules.time_zones import EPOCH
from evertick.engine.fire_schedules import (
    UNPLANNABLE,
    FireResult,
    JsonObject,
    is_last,
    plan_end,
    plan_if_possible,
    plan_row,
    plan_skip,
    read_spec,
    skip_row,
    spec_json,
)
from evertick.engine.runs import find_dag, find_dag_row
from evertick.engine.verbs import did_you_mean


async def refuse_loops(
    conn: AsyncConnection,
    *,
    wanted: Mapping[str, Sequence[NamedSchedule]],
    outlets: Mapping[str, Collection[str]],
    stays: Callable[[DependencyWait], bool],
) -> None:
    """`wanted`: the schedules that DAGs are about to have, in addition to current ones that stay; `outlets`: the assets that
    they update."""
    new = {dag: [each for each in some if each.spec.kind is ScheduleKind.AFTER] for dag, some in wanted.items()}
    if not any(new.values()):
        return
    waits: dict[str, list[Condition | Source]] = {}
    kept = [each for each in await schedules.waits(conn) if each.dag not in wanted or stays(each)]
    own = {(each.dag, each.name) for each in kept}
    for name, text in [
        *((each.dag, each.condition) for each in kept),
        *((dag, each.spec.after or "") for dag, some in new.items() for each in some if (dag, each.name) not in own),
    ]:
        try:
            waits.setdefault(name, []).append(read_text(text))
        except InvalidSchedule:
            continue  # it never fires
    updated: dict[str, set[str]] = {}
    for name, asset in await schedules.outlets(conn, dags=list(waits)):
        updated.setdefault(name, set()).add(asset)
    updated |= {dag: set(assets) for dag, assets in outlets.items()}
    for dag in (dag for dag, some in new.items() if some):
        if way := find_loop(dag, waits, updated):
            raise CyclicDependency(
                f"DAG {dag!r} would start itself again endlessly: {' → '.join(way)}. Give one of them a time instead of"
                " after(...), or let it also wait for something that none of them causes."
            )


def outlets_of(spec: DagSpec) -> set[str]:
    """The assets that a DAG updates."""
    return {asset for task in spec.tasks for asset in task.outlets}


MOVED = "EV002"


# A schedule fires at most twenty times a second, and a change takes milliseconds: this many conflicts mean heavy contention.
_MOST_TRIES = 100


T = TypeVar("T")


_TICK = timedelta(microseconds=1)


Planner = Callable[[DagSchedule, datetime], JsonObject | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSnapshot:
    """The state of a DAG's schedules at `now`, and the plans for their due fires, for a change to `settle`: few enough to be
    decided by the change itself. `dag_id` is None for a DAG that may not exist yet."""

    dag_id: int | None
    now: datetime
    rows: list[DagSchedule]
    seen: list[list[object]]
    settle: list[JsonObject]


@sql_function(retries=False)
async def apply_due_fires(conn: AsyncConnection, *, plans: list[JsonObject]) -> FireResult: ...


async def read_snapshot(
    conn: AsyncConnection, *, dag: str, plan: Planner, name: str | None = None, dag_id: int | None = None
) -> ScheduleSnapshot:
    """Read the DAG's schedules, or the one of that name. Of a long backlog all but the last part is decided immediately."""
    while True:
        now = await shards.read_clock(conn)
        rows = await schedules.of_dag(conn, dag=dag, name=name)
        plans = [each for row in rows if (each := plan(row, now))]
        more = [each for each in plans if not is_last(each, now)]
        if not more:
            seen = [_seen(row) for row in rows]
            return ScheduleSnapshot(dag_id=dag_id, now=now, rows=rows, seen=seen, settle=plans)
        await apply_due_fires(conn, plans=more)


async def change_schedules(
    conn: AsyncConnection,
    change: Callable[[ScheduleSnapshot], Awaitable[T]],
    *,
    dag: str,
    plan: Planner,
    name: str | None = None,
    dag_id: int | None = None,
) -> T:
    """Plan and apply a change, and repeat it whenever a fire or another change came in between."""

    async def once() -> T:
        return await change(await read_snapshot(conn, dag=dag, plan=plan, name=name, dag_id=dag_id))

    return await until_unmoved(once)


async def until_unmoved(once: Callable[[], Awaitable[T]]) -> T:
    """Repeat a change, which plans and applies, for as long as schedules move in between."""
    for _ in range(_MOST_TRIES):
        try:
            return await retry_on_deadlock(once)
        except psycopg.Error as error:
            if error.sqlstate != MOVED:
                raise
    raise Conflict("The schedules change faster than this change can be made. Nothing was changed: try again.")


def _seen(row: DagSchedule) -> list[object]:
    due = None if row.next_due is None else (row.next_due - EPOCH) // timedelta(microseconds=1)
    return [row.schedule_id, row.version, due, row.paused, row.error is not None]


@sql_function(retries=False)
async def _put_schedule(
    conn: AsyncConnection,
    before: ScheduleSnapshot,
    *,
    schedule: JsonObject,
    expected: int | None,
    request: str | None,
    origin: str,
    actor: Actor,
) -> int | None:
    """The schedule's new version, or None if it was not at the expected one."""


@sql_function(retries=False)
async def change_schedule(
    conn: AsyncConnection, before: ScheduleSnapshot, *, name: str, change: str, expected: int | None, actor: Actor
) -> int | None:
    """Pause, unpause or delete one schedule. Its new version, or None if it was not at the expected one."""


DEFAULT_WINDOW_SECONDS = 86_400.0
# What `put_schedule` returns for a key that was used with another schedule.
_OTHER_REQUEST = -1


async def put_schedule(
    conn: AsyncConnection,
    *,
    dag: str,
    schedule: NamedSchedule,
    actor: Actor,
    expected_version: int | None = None,
    request: str | None = None,
    origin: str = "user",
) -> int:
    """The schedule's new version. `expected_version` 0 means that it must not exist; None overwrites any.

    A `request` id makes a call that is repeated after a lost reply one change. The origin "code" returns it to the code.
    """
    row, spec = await find_dag(conn, dag)
    await refuse_loops(
        conn, wanted={dag: [schedule]}, outlets={dag: outlets_of(spec)}, stays=lambda wait: wait.name != schedule.name
    )

    stored = None if request is None else f"{request} {_digest(schedule)}"

    async def put(before: ScheduleSnapshot) -> int | None:
        wanted = schedule_row(spec, schedule, before.now, old=next(iter(before.rows), None))
        return await _put_schedule(
            conn, before, schedule=wanted, expected=expected_version, request=stored, origin=origin, actor=actor
        )

    def plan(old: DagSchedule, now: datetime) -> JsonObject | None:
        return plan_replaced(old, schedule, now)

    version = await change_schedules(conn, put, dag=dag, plan=plan, name=schedule.name, dag_id=row.dag_id)
    if version == _OTHER_REQUEST:
        raise Conflict(f"Key {request!r} belongs to another change of schedule {schedule.name!r}: choose another key.")
    if version is None:
        raise await conflict(conn, dag=dag, name=schedule.name, expected=expected_version)
    return version


def _digest(schedule: NamedSchedule) -> str:
    """Recognizes a key that is used again for another schedule."""
    text = json.dumps(asdict(schedule), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def conflict(conn: AsyncConnection, *, dag: str, name: str, expected: int | None) -> Conflict:
    """The error for a writer whose version is outdated."""
    found = [each.version for each in await schedules.of_dag(conn, dag=dag, name=name)]
    stands = f"is at version {found[0]}" if found else "does not exist"
    return Conflict(f"Schedule {name!r} of {dag} {stands}, not at {expected}. Read it again and repeat the change.")


def schedule_row(spec: DagSpec, schedule: NamedSchedule, now: datetime, *, old: DagSchedule | None) -> JsonObject:
    """One schedule of the DAG as the tables hold it. It starts after `now`; if its instants stay and only its jitter
    or its policies change, it continues after the fires that were already due."""
    schedule = _with_stored_instants(schedule, old)
    delay = delay_of(schedule.spec, dag=spec.name, name=schedule.name)
    keeps = old is not None and _pattern(old.spec) == _pattern(schedule.spec.to_json())
    first = next_after(schedule.spec, now - timedelta(seconds=old.delay_seconds) if old and keeps else now)
    if keeps and old is not None and old.next_due is None and (stored := _last_stored(old)) is not None:
        first = next_after(schedule.spec, stored)  # it had run out of instants
    window = spec.catchup_window_seconds if schedule.catchup_window_seconds is None else schedule.catchup_window_seconds
    misfire = schedule.misfire or spec.misfire
    if schedule.spec.catchup:
        window, misfire = LONGEST_WINDOW_SECONDS if window is None else window, schedule.misfire or MisfirePolicy.ALL
        if (since := _caught_up(old)) is not None:
            first = next_after(schedule.spec, since)
    return {
        "name": schedule.name,
        "spec": spec_json(schedule.spec),
        # Of events they are only a part: the rest comes with each event, and all are checked then.
        "params": dict(schedule.params) if schedule.spec.event else check_run_params(spec, schedule.params),
        "misfire": misfire,
        "window_seconds": DEFAULT_WINDOW_SECONDS if window is None else window,
        "catchup_limit": schedule.catchup_limit or spec.catchup_limit,
        "overlap": schedule.overlap or spec.overlap,
        "start_within": schedule.start_within_seconds or spec.start_within_seconds,
        "finish_within": schedule.finish_within_seconds or spec.finish_within_seconds,
        "delay_seconds": delay.total_seconds(),
        "next_due": (first + delay).isoformat() if first else None,
        "skipped": None if keeps or schedule.spec.catchup else skip_row(_passed(schedule.spec, now)),
    }


def plan_replaced(old: DagSchedule, new: NamedSchedule | None, now: datetime) -> JsonObject | None:
    """The plan for what is due until `now` of a schedule that is about to change or end. One that catches up takes over what
    the pause of its predecessor held back."""
    return None if new is not None and new.spec.catchup and old.paused else plan_end(old, now)


def _caught_up(old: DagSchedule | None) -> datetime | None:
    """The instant after which a schedule that catches up begins: before its first one when it is new, and where a paused one
    stands. None: after now, as others do."""
    if old is None:
        return EARLIEST
    return old.next_due - _TICK - timedelta(seconds=old.delay_seconds) if old.paused and old.next_due else None


def _pattern(text: str) -> object:
    """The part of a schedule that defines its instants, without the jitter, and without those computed ahead."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(raw, dict):
        return raw
    computed = ("times", "intervals") if raw.get("kind") == ScheduleKind.COMPUTED else ()
    return {name: value for name, value in raw.items() if name not in ("jitter_seconds", *computed)}


def _last_stored(old: DagSchedule) -> datetime | None:
    spec = read_spec(old.spec)
    return spec.instants[-1] if spec.kind is ScheduleKind.COMPUTED and spec.instants else None


def _with_stored_instants(schedule: NamedSchedule, old: DagSchedule | None) -> NamedSchedule:
    """A schedule that the user's code computes keeps the instants that are stored."""
    if schedule.spec.kind is not ScheduleKind.COMPUTED or old is None:
        return schedule
    try:
        return replace(schedule, spec=renewed(read_spec(old.spec), schedule.spec))
    except UNPLANNABLE:
        return schedule


def _passed(spec: ScheduleSpec, now: datetime) -> SkipRange | None:
    """The past instants of a schedule that lists its instants."""
    if spec.kind not in (ScheduleKind.ONCE, ScheduleKind.TIMES):
        return None
    return skip_until(spec, next_due=next_after(spec, EARLIEST), now=now, reason=SkipReason.PAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUp:
    """`policy` SKIP runs none of them. Others go back as far as `window_seconds`, or the schedule's own window. None: those of
    a schedule that catches up, by its own policy, and none of another."""

    policy: MisfirePolicy | None = None
    window_seconds: float | None = None

    def plan(self, schedule: DagSchedule, now: datetime) -> JsonObject | None:
        """A plan for `settle_schedules`, complete: a remainder would fall under the schedule's own policy."""
        most = schedule.catchup_limit or MOST_MISSED
        try:
            if self.policy is MisfirePolicy.SKIP or (self.policy is None and not read_spec(schedule.spec).catchup):
                return plan_skip(schedule, now, SkipReason.PAUSED)
            return plan_row(schedule, now, most_fires=most, policy=self.policy, window_seconds=self.window_seconds)
        except UNPLANNABLE:
            return None


NOTHING = CatchUp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The decision about one schedule's missed fires."""

    name: str
    runs: list[datetime]
    skipped: int
    reason: str | None


async def preview(conn: AsyncConnection, *, dag: str, catch_up: CatchUp, name: str | None = None) -> list[Missed]:
    """A preview of what an unpause now would do to the missed fires of a DAG's schedules, or of one. Ignores overlap."""
    now = await shards.read_clock(conn)
    found = []
    for each in await schedules.of_dag(conn, dag=dag, name=name):
        is_let_go = each.is_held if name is not None else not each.is_held
        if each.paused and is_let_go and (plan := catch_up.plan(each, now)):
            found.append(_missed(each.name, plan))
    return found


def _missed(name: str, plan: JsonObject) -> Missed:
    fires, skipped = plan["fires"], plan.get("skipped")
    assert isinstance(fires, list)
    runs = [datetime.fromisoformat(fire) for fire in fires]
    if not isinstance(skipped, dict):
        return Missed(name=name, runs=runs, skipped=0, reason=None)
    return Missed(name=name, runs=runs, skipped=int(skipped["count"]), reason=str(skipped["reason"]))


async def pause_schedule(
    conn: AsyncConnection, *, dag: str, name: str, actor: Actor, expected_version: int | None = None
) -> int:
    """Its new version. Due fires are decided first."""
    return await _change(conn, "pause", dag, name, actor, expected_version, plan_if_possible)


async def unpause_schedule(
    conn: AsyncConnection,
    *,
    dag: str,
    name: str,
    actor: Actor,
    expected_version: int | None = None,
    catch_up: CatchUp = NOTHING,
) -> int:
    """Its new version. While its DAG is paused, it stays paused with it."""

    def plan(schedule: DagSchedule, now: datetime) -> JsonObject | None:
        # Applied under the version that this change gives the schedule.
        if not schedule.is_held:
            return None
        return catch_up.plan(replace(schedule, version=schedule.version + 1), now)

    return await _change(conn, "unpause", dag, name, actor, expected_version, plan)


async def delete_schedule(
    conn: AsyncConnection, *, dag: str, name: str, actor: Actor, expected_version: int | None = None
) -> int:
    """Its last version. Due fires are decided first; its runs and its history stay."""
    return await _change(conn, "delete", dag, name, actor, expected_version, plan_end)


async def reset_schedule(conn: AsyncConnection, *, dag: str, name: str, actor: Actor) -> bool:
    """Give a schedule back to the code: as the DAG's file declares it, or deleted if it does not. Returns whether it exists."""
    _, spec = await find_dag(conn, dag)
    declared = next((each for each in spec.schedules if each.name == name), None)
    if declared is None:
        await delete_schedule(conn, dag=dag, name=name, actor=actor)
        return False
    await put_schedule(conn, dag=dag, schedule=declared, actor=actor, origin="code")
    return True


async def find_schedule(conn: AsyncConnection, dag: str, name: str) -> DagSchedule:
    """The schedule, or an error that suggests a similar name."""
    found = await schedules.of_dag(conn, dag=dag)
    for each in found:
        if each.name == name:
            return each
    names = [each.name for each in found]
    hint = did_you_mean(name, names, f"It has: {', '.join(names[:10]) or 'none'}.")
    raise NotFound(f"DAG {dag!r} has no schedule {name!r}. {hint}")


async def _change(
    conn: AsyncConnection, change: str, dag: str, name: str, actor: Actor, expected: int | None, plan: Planner
) -> int:
    row = await find_dag_row(conn, dag)
    await find_schedule(conn, dag, name)

    async def apply(before: ScheduleSnapshot) -> int | None:
        return await change_schedule(conn, before, name=name, change=change, expected=expected, actor=actor)

    version = await change_schedules(conn, apply, dag=dag, plan=plan, name=name, dag_id=row.dag_id)
    if version is None:
        raise await conflict(conn, dag=dag, name=name, expected=expected)
    return version
