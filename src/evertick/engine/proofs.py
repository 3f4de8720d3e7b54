"""Checks the guarantees on the live database, slice by slice, and records what was checked and what was found.

A slice reads a bounded number of rows and locks nothing. A violation counts if a second query finds it again. What the
scheduler decides is never used to judge it, except `inspect_run`, by which the reconciliation finds what it repairs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby, islice

from psycopg import AsyncConnection

from evertick.db.queries import proofs
from evertick.db.queries.proofs import FoundViolation, ScheduleVersionRow, ViolationRow
from evertick.db.queries.shards import read_clock
from evertick.domain.errors import InvalidSchedule
from evertick.domain.proofs import ActiveVersion, Check, Violation, owed_fires
from evertick.engine.fire_schedules import read_spec
from evertick.engine.verbs import leader_verb

JsonObject = dict[str, object]

# Of live work: small tables that are read as a whole.
WORK_CHECKS = (
    *(Check.LEASE_WITHOUT_TASK, Check.TWO_OWNERS, Check.READY_WITHOUT_TASK, Check.TIMER_WITHOUT_TASK),
    *(Check.WAITER_WITHOUT_TASK, Check.HOLDER_WITHOUT_TASK, Check.GATE_COUNTED_WRONG, Check.GATE_OVER_SIZE),
    *(Check.EVENT_UNDELIVERED, Check.BACKFILL_COUNTED_WRONG),
)
# Of the tasks of some runs: all open runs in each round, and each run once more after its end.
OPEN_CHECKS = (
    *(Check.RUNNING_WITHOUT_LEASE, Check.QUEUED_WITHOUT_DISPATCH, Check.AVAILABLE_WITHOUT_PLACE),
    *(Check.PENDING_WITHOUT_TIMER, Check.PENDING_WITHOUT_CAUSE, Check.DEFERRED_WITHOUT_WAIT),
    Check.RUN_WITHOUT_CAUSE,
)
RUN_CHECKS = (
    *(Check.RUN_WITHOUT_STATUS, Check.RUN_COUNTED_WRONG, Check.RUN_ENDED_EARLY, Check.RUN_RESULT_WRONG),
    *(Check.RETRIES_OVER_BUDGET, Check.ATTEMPT_ENDED_TWICE, Check.EPOCH_WENT_BACK),
)
RUNS, FIRES, TRIGGERS = "runs", "fires", "triggers"
# Commits of the same moment may become visible later than others, and a leader may change.
SETTLED = timedelta(seconds=60)
RUNS_AT_ONCE, SCHEDULES_AT_ONCE, FIRES_AT_ONCE, ENTRIES_AT_ONCE = 200, 500, 2000, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Where the next round begins: after the run that ended last, the entry of the audit log, and the instant."""

    ended_at: datetime
    run_id: int
    entry_id: int
    fires: datetime

    def stored(self) -> dict[str, JsonObject]:
        return {
            RUNS: {"ended_at": self.ended_at.isoformat(), "run_id": self.run_id},
            TRIGGERS: {"entry_id": self.entry_id},
            FIRES: {"until": self.fires.isoformat()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one slice has checked, the position of its scope if it moved, and what it found."""

    checked: dict[Check, int]
    found: list[Violation] = field(default_factory=list)
    positions: dict[str, JsonObject] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewViolation:
    check_name: str
    subject: str
    run_id: int | None
    detail: str


@leader_verb
async def record_proof(
    conn: AsyncConnection, *, shard: int, epoch: int, done: list[JsonObject], found: list[JsonObject], ended: list[int]
) -> list[NewViolation]:
    """Record the result of a slice. Returns the violations that are new."""


async def record_slice(
    conn: AsyncConnection, done: Slice, ended: list[int], *, shard: int, epoch: int
) -> list[NewViolation]:
    rows: list[JsonObject] = [{"name": name, "checked": count} for name, count in done.checked.items()]
    rows += [{"name": name, "checked": 0, "position": position} for name, position in done.positions.items()]
    found: list[JsonObject] = [
        {"run": each.run_id, **{name: value for name, value in asdict(each).items() if name != "run_id"}}
        for each in done.found
    ]
    return await record_proof(conn, shard=shard, epoch=epoch, done=rows, found=found, ended=ended)


async def positions_since(conn: AsyncConnection, since: datetime | None) -> Positions:
    """The beginning of a proof: since an instant, or where the continuous proof is (from now on, if it never ran)."""
    stored = {} if since else {each.check_name: each.position or {} for each in await proofs.cursors(conn)}
    start = since or await read_clock(conn)
    runs = stored.get(RUNS, {})
    entry = stored.get(TRIGGERS, {}).get("entry_id")
    return Positions(
        ended_at=_instant(runs.get("ended_at")) or start,
        run_id=int(str(runs.get("run_id", 0))),
        entry_id=await proofs.first_entry(conn, since=start) if entry is None else int(str(entry)),
        fires=_instant(stored.get(FIRES, {}).get("until")) or start,
    )


async def round_of(conn: AsyncConnection, begin: Positions, *, settled: timedelta = SETTLED) -> AsyncIterator[Slice]:
    """One round over everything: the live work, the open runs, and what has happened since `begin`."""
    until = await read_clock(conn) - settled
    done = await _confirmed(conn, await _check(conn, WORK_CHECKS, None))
    # The first round has no positions yet: the next one must not begin later.
    yield Slice(checked=done.checked, found=done.found, positions=begin.stored())
    async for each in _open_runs(conn):
        yield each
    async for each in _ended_runs(conn, begin, until):
        yield each
    async for each in _triggers(conn, begin.entry_id, until):
        yield each
    async for each in _fires(conn, begin.fires, until):
        yield each


async def resolved(conn: AsyncConnection, known: Sequence[FoundViolation]) -> list[int]:
    """Those of the known violations that no longer hold."""
    ended: list[int] = []
    for name, group in groupby(sorted(known, key=lambda each: each.check_name), key=lambda each: each.check_name):
        of_check = list(group)
        runs = sorted({each.run_id for each in of_check if each.run_id is not None})
        still = {each.subject for each in await _again(conn, Check(name), runs, [each.subject for each in of_check])}
        ended += [each.violation_id for each in of_check if each.subject not in still]
    return ended


async def _check(conn: AsyncConnection, checks: Iterable[Check], runs: list[int] | None) -> Slice:
    found: list[Violation] = []
    counts: dict[Check, int] = {}
    for check in checks:
        found += [_violation(check, row) for row in await proofs.violations(conn, check, runs=runs)]
        counts[check] = 1 if runs is None else len(runs)
    return Slice(checked=counts, found=found)


async def _confirmed(conn: AsyncConnection, done: Slice) -> Slice:
    if not done.found:
        return done
    found: list[Violation] = []
    for check, group in groupby(sorted(done.found, key=lambda each: each.check), key=lambda each: each.check):
        first = list(group)
        runs = sorted({each.run_id for each in first if each.run_id is not None})
        subjects = {each.subject for each in first}
        found += [each for each in await _again(conn, check, runs, sorted(subjects)) if each.subject in subjects]
    return Slice(checked=done.checked, found=found, positions=done.positions)


async def _again(conn: AsyncConnection, check: Check, runs: list[int], subjects: list[str]) -> list[Violation]:
    if check is Check.FIRE_UNANSWERED:
        return await _unanswered(conn, [_fire_of(subject) for subject in subjects])
    if check is Check.TRIGGER_LOST:
        return [Violation(check=check, subject=subject, detail="") for subject in subjects]
    found = await proofs.violations(conn, check, runs=None if check in WORK_CHECKS else runs)
    return [_violation(check, row) for row in found]


async def _open_runs(conn: AsyncConnection) -> AsyncIterator[Slice]:
    dag_id = run_id = 0
    while slice_ := await proofs.open_runs(conn, dag_id=dag_id, run_id=run_id, limit=RUNS_AT_ONCE):
        yield await _confirmed(conn, await _check(conn, OPEN_CHECKS, [run for _, run in slice_]))
        dag_id, run_id = slice_[-1]


async def _ended_runs(conn: AsyncConnection, begin: Positions, until: datetime) -> AsyncIterator[Slice]:
    since, run_id = begin.ended_at, begin.run_id
    while ended := await proofs.ended_runs(conn, since=since, run_id=run_id, until=until, limit=RUNS_AT_ONCE):
        run_id, since = ended[-1]
        done = await _confirmed(conn, await _check(conn, RUN_CHECKS, [run for run, _ in ended]))
        position: JsonObject = {"ended_at": since.isoformat(), "run_id": run_id}
        yield Slice(checked=done.checked, found=done.found, positions={RUNS: position})


async def _triggers(conn: AsyncConnection, entry_id: int, until: datetime) -> AsyncIterator[Slice]:
    while entries := await proofs.trigger_lost(conn, after=entry_id, until=until, limit=ENTRIES_AT_ONCE):
        entry_id = entries[-1].entry_id
        lost = [
            Violation(
                check=Check.TRIGGER_LOST,
                subject=f"run {each.run_id}",
                detail=f"was acknowledged by entry {each.entry_id} of the audit log, and does not exist",
                run_id=each.run_id,
            )
            for each in entries
            if each.is_lost
        ]
        checked = {Check.TRIGGER_LOST: sum(each.is_trigger for each in entries)}
        yield Slice(checked=checked, found=lost, positions={TRIGGERS: {"entry_id": entry_id}})


async def _fires(conn: AsyncConnection, after: datetime, until: datetime) -> AsyncIterator[Slice]:
    """The position moves once all schedules are checked: a round that is cut short is repeated."""
    known = await proofs.proven_until(conn, since=after, until=until)
    last = min(until, known.until or until)
    first = max(after, known.pruned_before or after)
    schedule_id = 0
    while rows := await proofs.schedule_versions(conn, after=schedule_id, limit=SCHEDULES_AT_ONCE):
        schedule_id = rows[-1].schedule_id
        owed = (
            (each, instant)
            for each, group in groupby(rows, key=lambda row: row.schedule_id)
            for instant in owed_fires(_readable(group), first, last)
        )
        while fires := list(islice(owed, FIRES_AT_ONCE)):
            found = await _unanswered(conn, fires)
            yield await _confirmed(conn, Slice(checked={Check.FIRE_UNANSWERED: len(fires)}, found=found))
    if last > after:
        yield Slice(checked={}, positions={FIRES: {"until": last.isoformat()}})


async def _unanswered(conn: AsyncConnection, fires: Sequence[tuple[int, datetime]]) -> list[Violation]:
    ids, instants = [each for each, _ in fires], [at for _, at in fires]
    return [
        Violation(
            check=Check.FIRE_UNANSWERED,
            subject=f"schedule {row.schedule_id} {row.at.astimezone(UTC).isoformat()}",
            detail=f"has {row.runs} runs and {row.skips} skip records",
        )
        for row in await proofs.fire_unanswered(conn, ids=ids, instants=instants)
    ]


def _fire_of(subject: str) -> tuple[int, datetime]:
    _, schedule_id, instant = subject.split()
    return int(schedule_id), datetime.fromisoformat(instant)


def _readable(rows: Iterable[ScheduleVersionRow]) -> list[ActiveVersion]:
    """Without one that cannot be read: it could not be planned either, which is in its `error`."""
    versions: list[ActiveVersion] = []
    for row in rows:
        with suppress(InvalidSchedule):
            version = ActiveVersion(
                spec=read_spec(row.spec),
                since=row.changed_at,
                until=row.until,
                is_active=not row.is_deleted and not row.is_paused_directly,
                delay_seconds=row.delay_seconds,
            )
            versions.append(version)
    return versions


def _violation(check: Check, row: ViolationRow) -> Violation:
    subject = row.name or f"run {row.run_id}"
    if row.idx is not None:
        subject += f" task {row.idx}" + ("" if row.map_index in (None, -1) else f"[{row.map_index}]")
    return Violation(
        check=check, subject=subject, detail=row.detail, run_id=row.run_id, idx=row.idx, map_index=row.map_index
    )


def _instant(text: object) -> datetime | None:
    return datetime.fromisoformat(text) if isinstance(text, str) else None
