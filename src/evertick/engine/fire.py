"""fire: due schedules become runs, and their cursors move, in one transaction per chunk (V1).

A schedule that cannot be planned is quarantined with its reason, a locked one is passed over; neither affects
another (V11).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

import psycopg
from psycopg import AsyncConnection, errors

from evertick.engine.bounded import TookTooLongError, at_most
from evertick.engine.fenced import as_leader, is_poison
from evertick.engine.plan import FIRES_PER_CALL, UNPLANNABLE, JsonObject, plan_row
from evertick.store import schedules
from evertick.store.schedules import DueSchedule, Settled

# Planning one schedule takes microseconds, and a thousand missed fires milliseconds.
PLAN_SECONDS = 1.0


class Half(IntEnum):
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
class _Batch:
    conn: AsyncConnection
    shard: int
    epoch: int
    most_fires: int
    due: dict[int, DueSchedule]
    fired: Fired


async def fire(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    batch: int,
    passed_over: Collection[int] = (),
    half: Half | None = None,
) -> Fired:
    """Decide one batch of the fires due now, of all schedules or of one half, except for the schedules to pass over."""
    due = await schedules.due(conn, shard=shard, batch=batch, passed_over=passed_over, half=half)
    fired = Fired(was_due=len(due), has_more=len(due) == batch)
    if not due:
        return fired
    now = due[0].read_at
    fired.lag_seconds = _lag(due, now)
    work = _Batch(conn, shard, epoch, min(batch, FIRES_PER_CALL), {each.schedule_id: each for each in due}, fired)
    plans, unplannable = _plan(due, now, most_fires=work.most_fires)
    for schedule, error in unplannable:
        await _set_aside(work, schedule, error, is_tried_again=False)
    await _settle(work, plans)
    return fired


@dataclass(frozen=True, slots=True)
class Ahead:
    """The fires due at one future instant, read and planned before it."""

    due_at: datetime
    due: list[DueSchedule]
    plans: list[JsonObject]


async def plan_ahead(
    conn: AsyncConnection, *, shard: int, due_at: datetime, batch: int, passed_over: Collection[int] = ()
) -> Ahead | None:
    """None if they exceed a batch, or if one cannot be planned: then they are read when they are due."""
    due = await schedules.due(conn, shard=shard, batch=batch, passed_over=passed_over, until=due_at)
    plans, unplannable = _plan(due, due_at, most_fires=min(batch, FIRES_PER_CALL))
    return Ahead(due_at, due, plans) if plans and not unplannable and len(due) < batch else None


async def fire_ahead(conn: AsyncConnection, ahead: Ahead, *, shard: int, epoch: int, batch: int) -> Fired:
    """Carry out a plan that was made ahead. A schedule that was changed, fired or paused since then, or that is not due yet by the
    database's clock, is left alone, and found by the next poll."""
    fired = Fired(was_due=len(ahead.due))
    due = {each.schedule_id: each for each in ahead.due}
    await _settle(_Batch(conn, shard, epoch, min(batch, FIRES_PER_CALL), due, fired), ahead.plans)
    fired.lost.clear()
    return fired


_Planned = tuple[list[JsonObject], list[tuple[DueSchedule, Exception]]]


def _plan(due: list[DueSchedule], now: datetime, *, most_fires: int) -> _Planned:
    """The plans, and the schedules that cannot be planned. One time limit for all: to set one for each takes as long as planning.
    If it is exceeded, each is planned separately, to find the schedule that does not finish."""
    try:
        with at_most(PLAN_SECONDS):
            return _plan_each(due, now, most_fires=most_fires)
    except TookTooLongError as error:
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


async def _settle(work: _Batch, plans: list[JsonObject]) -> None:
    """Carry out all at once; if the database rejects them, halve the batch until the rejected one is alone."""
    if not plans:
        return
    try:
        done = await as_leader(
            lambda: schedules.fire(work.conn, shard=work.shard, epoch=work.epoch, plans=plans),
            shard=work.shard,
            epoch=work.epoch,
        )
    except psycopg.Error as error:
        is_slow = isinstance(error, errors.QueryCanceled) and work.most_fires == 1
        if not (is_poison(error.sqlstate) or is_slow or isinstance(error, errors.LockNotAvailable)):
            raise
        if len(plans) > 1:
            middle = len(plans) // 2
            await _settle(work, plans[:middle])
            await _settle(work, plans[middle:])
            return
        schedule = work.due[_id_of(plans[0])]
        if isinstance(error, errors.LockNotAvailable):
            work.fired.passed_over.append(schedule.schedule_id)
        else:
            await _set_aside(work, schedule, error, is_tried_again=True)
        return
    _count(work.fired, plans, done)


def _count(fired: Fired, plans: list[JsonObject], done: Settled) -> None:
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


async def _set_aside(work: _Batch, schedule: DueSchedule, error: Exception, *, is_tried_again: bool) -> None:
    advice = "It will be retried later." if is_tried_again else "Publish a corrected schedule to clear this."
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}. {advice}"
    is_ours = await as_leader(
        lambda: schedules.set_aside(
            work.conn,
            shard=work.shard,
            epoch=work.epoch,
            due=schedule,
            reason=reason,
            is_tried_again=is_tried_again,
        ),
        shard=work.shard,
        epoch=work.epoch,
    )
    if is_ours:
        work.fired.quarantined.append(schedule.schedule_id)


def _id_of(plan: JsonObject) -> int:
    return int(str(plan["schedule_id"]))


def _lag(due: list[DueSchedule], now: datetime) -> float:
    return max((now - due[0].next_due).total_seconds(), 0.0)
