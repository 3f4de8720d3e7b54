"""Fires schedules: due rows are read and planned, and each fire becomes a run or a skip record in one transaction (V1).

Planning is pure and has a CPU limit: a decision that does not finish is interrupted (A1), and a schedule that the
database refuses is quarantined alone (V11).
"""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from types import FrameType

import psycopg
from psycopg import AsyncConnection, errors

from evertick.db.queries import schedules
from evertick.db.queries.overview import Upcoming
from evertick.db.queries.schedules import DagSchedule, DueSchedule, ListedSchedule, ReadyPartition
from evertick.domain.errors import EvertickError
from evertick.domain.schedules.misfire import (
    MOST_MISSED,
    FirePlan,
    MisfirePolicy,
    OverlapPolicy,
    SkipRange,
    SkipReason,
    count_between,
    never_was,
    plan_fires,
    skip_until,
)
from evertick.domain.schedules.run_partitions import partition_at
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe, next_after
from evertick.engine.verbs import is_poison, leader_verb

_TICK = timedelta(microseconds=1)


class CpuLimitExceeded(Exception):
    """The computation did not finish in time."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise within the block once this process has used that much CPU time.

    Uses the kernel's timer, because nothing else can interrupt code that never waits. It measures CPU time, so a suspended or
    busy machine does not count. Works only in the main thread, where the scheduler runs; in other threads there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise CpuLimitExceeded(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


JsonObject = dict[str, object]
FIRES_PER_CALL = 100
# As many as the statements `due` and `of_dag` read, but one.
READY_PER_CALL = 100


_NONE = timedelta(0)


# The errors that a stored schedule can cause in its own planning.
UNPLANNABLE = (EvertickError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_spec(raw: JsonObject | str) -> ScheduleSpec:
    """Parse a schedule from the database, decoded or as stored. Cached: validation takes a third of the time of a fire,
    and many schedules are alike."""
    return _parsed(raw if isinstance(raw, str) else json.dumps(raw))


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> ScheduleSpec:
    return ScheduleSpec.from_json(text)


def in_words(raw: JsonObject) -> str:
    """A stored schedule in words, even if it cannot be parsed."""
    try:
        return describe(read_spec(raw))
    except UNPLANNABLE:
        return "cannot be read"


def spec_json(spec: ScheduleSpec) -> JsonObject:
    stored: JsonObject = json.loads(spec.to_json())
    return stored


def plan_row(
    due: DueSchedule | DagSchedule,
    now: datetime,
    *,
    most_fires: int = FIRES_PER_CALL,
    policy: MisfirePolicy | None = None,
    window_seconds: float | None = None,
) -> JsonObject | None:
    """The plan for `settle_schedules` of one schedule that is due at `now`; None if it is not.

    Without an explicit policy and window, the schedule's own apply.
    """
    if due.next_due is None or due.next_due > now:
        return None
    spec = read_spec(due.spec)
    if due.ready:
        return _plan_ready(due, due.ready, now, most_fires)
    delay = timedelta(seconds=due.delay_seconds) if due.delay_seconds else _NONE
    plan = plan_fires(
        spec,
        next_due=due.next_due - delay,
        now=now - delay,
        policy=policy or MisfirePolicy(due.misfire),
        window_seconds=due.window_seconds if window_seconds is None else window_seconds,
        limit=most_fires,
        most_missed=due.catchup_limit or MOST_MISSED,
    )
    row = _row(due, plan)
    if spec.partitions is not None and plan.fires:
        row["partitions"] = [(fire.isoformat(), *partition_at(spec, fire).plain()) for fire in plan.fires]
    return row


def _plan_ready(
    due: DueSchedule | DagSchedule, ready: Sequence[ReadyPartition], now: datetime, most_fires: int
) -> JsonObject:
    """A run for each complete partition that is due, of those that were read; the next batch finds the others."""
    fires = [datetime.fromisoformat(fire) for fire, *_ in ready]
    count = max(sum(fire <= now for fire in fires[: min(READY_PER_CALL, most_fires)]), 1)
    row = _row(
        due, FirePlan(fires=tuple(fires[:count]), skipped=None, next_due=fires[count] if fires[count:] else None)
    )
    return {**row, "partitions": ready[:count]}


def plan_if_possible(schedule: DagSchedule, now: datetime) -> JsonObject | None:
    """The same for a change of a schedule: one that cannot be planned or is quarantined has nothing to decide, and must not
    prevent its own repair."""
    if schedule.paused or schedule.error is not None:
        return None
    try:
        return plan_row(schedule, now)
    except UNPLANNABLE:
        return None


def plan_end(schedule: DagSchedule, now: datetime) -> JsonObject | None:
    """The plan for everything due until `now` of a schedule that is about to change or end. The fires that a pause suppressed
    are skipped and recorded."""
    if not schedule.paused and schedule.error is None:
        return plan_if_possible(schedule, now)
    return plan_skip(schedule, now, SkipReason.PAUSED if schedule.paused else SkipReason.SET_ASIDE)


def plan_skip(schedule: DagSchedule, now: datetime, reason: SkipReason) -> JsonObject | None:
    """Skip everything that is due and continue after `now`. None for a schedule that cannot be parsed: the scheduler
    quarantines it when it is due."""
    if schedule.next_due is None or schedule.next_due > now:
        return None
    if schedule.ready:
        taken = schedule.ready[:READY_PER_CALL]
        first, last = (datetime.fromisoformat(taken[place][0]) for place in (0, -1))
        passed = SkipRange(first=first, last=last, count=len(taken), reason=reason)
        rest = schedule.ready[READY_PER_CALL:]
        following = datetime.fromisoformat(rest[0][0]) if rest else None
        row = _row(schedule, FirePlan(fires=(), skipped=passed, next_due=following))
        return {**row, "partitions": taken}
    delay = timedelta(seconds=schedule.delay_seconds)
    try:
        spec = read_spec(schedule.spec)
        skipped = skip_until(spec, next_due=schedule.next_due - delay, now=now - delay, reason=reason)
        following = next_after(spec, now - delay)
        missing = never_was(spec, schedule.next_due - delay, following)
    except UNPLANNABLE:
        return None
    return _row(schedule, FirePlan(fires=(), skipped=skipped, next_due=following, missing=missing))


def is_last(plan: JsonObject, now: datetime) -> bool:
    """Whether nothing is due any more once this plan is carried out."""
    following = plan["next_due"]
    return following is None or datetime.fromisoformat(str(following)) > now


def is_same_spec(stored: str, wanted: object) -> bool:
    """Whether both have the same instants, or compute them in the same way."""
    try:
        return bool(_identity(json.loads(stored)) == _identity(wanted))
    except (ValueError, RecursionError):
        return False


def _identity(spec: object) -> object:
    if isinstance(spec, dict) and spec.get("kind") == ScheduleKind.COMPUTED:
        return {name: value for name, value in spec.items() if name not in ("times", "intervals")}
    return spec


def skip_row(skipped: SkipRange | None) -> JsonObject | None:
    if skipped is None:
        return None
    return {
        "first_at": skipped.first.isoformat(),
        "last_at": skipped.last.isoformat(),
        "count": skipped.count,
        "reason": skipped.reason,
    }


def _row(due: DueSchedule | DagSchedule, plan: FirePlan) -> JsonObject:
    assert due.next_due is not None
    following = plan.next_due
    if following is not None and due.delay_seconds:
        following += timedelta(seconds=due.delay_seconds)
    fires = [fire.isoformat() for fire in plan.fires]
    row: JsonObject = {
        "schedule_id": due.schedule_id,
        "version": due.version,
        "expected": due.next_due.isoformat(),
        "fires": fires,
        "last_fire": fires[-1] if fires else None,
        "next_due": following.isoformat() if following else None,
    }
    # Only if set: without them the database neither looks for open runs nor sets a deadline.
    if plan.skipped is not None:
        row["skipped"] = skip_row(plan.skipped)
    if plan.missing is not None:
        row["missing"] = skip_row(plan.missing)
    if due.overlap != OverlapPolicy.ALLOW:
        row["overlap"] = due.overlap
    if due.start_within is not None or due.finish_within is not None:
        row["has_deadlines"] = True
    return row


# Planning one schedule takes microseconds, and a thousand missed fires milliseconds.
PLAN_SECONDS = 1.0


class ScheduleHalf(IntEnum):
    """Which schedules, by their ids, if two processes share the work."""

    EVEN = 0
    ODD = 1


@dataclass(slots=True, kw_only=True)
class Fired:
    """The result of one batch. `quarantined` could not be planned or stored; `passed_over` is locked by another session; `lost` is
    being changed right now, or was already decided by another process."""

    settled: int = 0
    was_due: int = 0
    has_more: bool = False
    runs: int = 0
    lag_seconds: float = 0.0
    canceled: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    quarantined: list[int] = field(default_factory=list)
    passed_over: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FireResult:
    """`won`: the schedules that advanced. `overlapped`: fires skipped because a run was open. `canceled`: tasks of
    such runs that received a stop request."""

    won: list[int]
    overlapped: int
    canceled: int


@leader_verb
async def _fire_schedules(conn: AsyncConnection, *, shard: int, epoch: int, plans: list[JsonObject]) -> FireResult:
    """Schedules that are not in `won` had already been advanced by another process."""


@leader_verb
async def quarantine_schedule(
    conn: AsyncConnection, *, shard: int, epoch: int, schedule_id: int, version: int, reason: str, is_tried_again: bool
) -> bool:
    """Whether that version was current and not quarantined before."""


@dataclass(frozen=True, slots=True)
class _Batch:
    conn: AsyncConnection
    shard: int
    epoch: int
    most_fires: int
    due: dict[int, DueSchedule]
    fired: Fired


async def fire_schedules(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    batch: int,
    passed_over: Collection[int] = (),
    half: ScheduleHalf | None = None,
) -> Fired:
    """Decide one batch of the fires due now, of all schedules or of one half, except for the schedules to pass over."""
    due = await schedules.due(conn, shard=shard, batch=batch, passed_over=list(passed_over), half=half)
    fired = Fired(was_due=len(due), has_more=len(due) == batch)
    if not due:
        return fired
    now = due[0].read_at
    fired.lag_seconds = max((now - due[0].next_due).total_seconds(), 0.0)
    work = _Batch(conn, shard, epoch, min(batch, FIRES_PER_CALL), {each.schedule_id: each for each in due}, fired)
    plans, unplannable = _plan(due, now, most_fires=work.most_fires)
    for schedule, error in unplannable:
        await _quarantine(work, schedule, error, is_tried_again=False)
    await _apply(work, plans)
    return fired


@dataclass(frozen=True, slots=True)
class PlannedFires:
    """The fires due at one future instant, read and planned before it."""

    due_at: datetime
    due: list[DueSchedule]
    plans: list[JsonObject]


async def plan_next_fires(
    conn: AsyncConnection, *, shard: int, due_at: datetime, batch: int, passed_over: Collection[int] = ()
) -> PlannedFires | None:
    """None if they exceed a batch, or if one cannot be planned: then they are read when they are due."""
    due = await schedules.due(conn, shard=shard, batch=batch, passed_over=list(passed_over), until=due_at)
    plans, unplannable = _plan(due, due_at, most_fires=min(batch, FIRES_PER_CALL))
    return PlannedFires(due_at, due, plans) if plans and not unplannable and len(due) < batch else None


async def fire_planned(conn: AsyncConnection, ahead: PlannedFires, *, shard: int, epoch: int, batch: int) -> Fired:
    """Carry out a plan that was made ahead. A schedule that was changed, fired or paused since then, or that is not due yet by the
    database's clock, is left alone, and found by the next poll."""
    fired = Fired(was_due=len(ahead.due))
    due = {each.schedule_id: each for each in ahead.due}
    await _apply(_Batch(conn, shard, epoch, min(batch, FIRES_PER_CALL), due, fired), ahead.plans)
    fired.lost.clear()
    return fired


_Planned = tuple[list[JsonObject], list[tuple[DueSchedule, Exception]]]


def _plan(due: list[DueSchedule], now: datetime, *, most_fires: int) -> _Planned:
    """The plans, and the schedules that cannot be planned. One time limit for all: to set one for each takes as long as planning.
    If it is exceeded, each is planned separately, to find the schedule that does not finish."""
    try:
        with cpu_limit(PLAN_SECONDS):
            return _plan_each(due, now, most_fires=most_fires)
    except CpuLimitExceeded as error:
        if len(due) == 1:
            return [], [(due[0], error)]
    plans, unplannable = [], []
    for schedule in due:
        more_plans, more_unplannable = _plan([schedule], now, most_fires=most_fires)
        plans += more_plans
        unplannable += more_unplannable
    return plans, unplannable


def _plan_each(due: list[DueSchedule], now: datetime, *, most_fires: int) -> _Planned:
    plans: list[JsonObject] = []
    unplannable: list[tuple[DueSchedule, Exception]] = []
    for schedule in due:
        try:
            plan = plan_row(schedule, now, most_fires=most_fires)
        except UNPLANNABLE as error:
            unplannable.append((schedule, error))
        else:
            plans += [plan] if plan else []
    return plans, unplannable


async def _apply(work: _Batch, plans: list[JsonObject]) -> None:
    """Carry out all at once; if the database rejects them, halve the batch until the rejected one is alone."""
    if not plans:
        return
    try:
        done = await _fire_schedules(work.conn, shard=work.shard, epoch=work.epoch, plans=plans)
    except psycopg.Error as error:
        is_slow = isinstance(error, errors.QueryCanceled) and work.most_fires == 1
        if not (is_poison(error.sqlstate) or is_slow or isinstance(error, errors.LockNotAvailable)):
            raise
        if len(plans) > 1:
            middle = len(plans) // 2
            await _apply(work, plans[:middle])
            await _apply(work, plans[middle:])
            return
        schedule = work.due[_id_of(plans[0])]
        if isinstance(error, errors.LockNotAvailable):
            work.fired.passed_over.append(schedule.schedule_id)
        else:
            await _quarantine(work, schedule, error, is_tried_again=True)
        return
    _count(work.fired, plans, done)


def _count(fired: Fired, plans: list[JsonObject], done: FireResult) -> None:
    won = set(done.won)
    fired.settled += len(won)
    fired.canceled += done.canceled
    if done.overlapped:
        fired.runs -= done.overlapped
        fired.skips["overlap"] += done.overlapped
    for plan in plans:
        if _id_of(plan) not in won:
            fired.lost.append(_id_of(plan))
        else:
            fires = plan["fires"]
            assert isinstance(fires, list)
            fired.runs += len(fires)
            for skipped in (plan.get("skipped"), plan.get("missing")):
                if isinstance(skipped, dict):
                    fired.skips[str(skipped["reason"])] += int(skipped["count"])


async def _quarantine(work: _Batch, schedule: DueSchedule, error: Exception, *, is_tried_again: bool) -> None:
    advice = "It will be retried later." if is_tried_again else "Publish a corrected schedule to clear this."
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}. {advice}"
    is_ours = await quarantine_schedule(
        work.conn,
        shard=work.shard,
        epoch=work.epoch,
        schedule_id=schedule.schedule_id,
        version=schedule.version,
        reason=reason.replace("\x00", ""),
        is_tried_again=is_tried_again,
    )
    if is_ours:
        work.fired.quarantined.append(schedule.schedule_id)


def _id_of(plan: JsonObject) -> int:
    return int(str(plan["schedule_id"]))


def fires_of(row: ListedSchedule, count: int) -> list[datetime]:
    """The next fires from the cursor; none while the schedule is paused or in error. Nominal instants: with jitter each is
    due a little later."""
    if row.paused or row.error or row.next_due is None:
        return []
    return fires_from(row.spec, row.next_due, delay_seconds=row.delay_seconds, count=count)


def fires_from(spec: dict[str, object], next_due: datetime, *, delay_seconds: float, count: int) -> list[datetime]:
    """The next fires of a schedule that is due at `next_due`."""
    return _fires(spec, next_due - timedelta(seconds=delay_seconds), count)


def fires_per_minute(row: Upcoming, now: datetime, minutes: int) -> list[int]:
    """The number of fires in each minute from now on. A fire that is overdue counts in the first minute."""
    first = row.next_due - timedelta(seconds=row.delay_seconds)
    edges = [now - timedelta(seconds=row.delay_seconds) + timedelta(minutes=place) for place in range(minutes + 1)]
    try:
        spec = read_spec(row.spec)
        counts = [count_between(spec, max(low, first - _TICK), high) for low, high in pairwise(edges)]
    except UNPLANNABLE:
        return [0] * minutes  # not evaluated yet
    counts[0] += first <= edges[0]
    return counts


def _fires(spec: dict[str, object], first: datetime, count: int) -> list[datetime]:
    fires = [first]
    try:
        parsed = read_spec(spec)
        while len(fires) < count and (following := next_after(parsed, fires[-1])) is not None:
            fires.append(following)
    except UNPLANNABLE:
        return []  # not evaluated yet
    return fires
