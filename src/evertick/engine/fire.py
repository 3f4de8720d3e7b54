"""fire: due schedules become runs, and their cursors move, in one transaction per chunk (V1).

A schedule that cannot be planned is quarantined with its reason and affects no other (V11).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg import AsyncConnection

from evertick.domain.errors import EvertickError, NotLeader
from evertick.engine.plan import JsonObject, plan_row
from evertick.store import schedules, shards
from evertick.store.db import retry_on_deadlock
from evertick.store.schedules import DueSchedule

NOT_LEADER = "EV001"
# What one row can be guilty of. Anything else is wrong with the database or the program, and no schedule's fault.
POISON = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.RaiseException)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """How many schedules were settled, how many were due, and how late the oldest was."""

    settled: int
    was_due: int
    lag_seconds: float
    quarantined: tuple[int, ...]


async def fire(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Fired:
    """Settle one batch of what is due now."""
    due = await schedules.due(conn, shard=shard, batch=batch)
    if not due:
        return Fired(settled=0, was_due=0, lag_seconds=0.0, quarantined=())
    now = await shards.read_clock(conn)
    plans: list[JsonObject] = []
    quarantined: list[int] = []
    for schedule in due:
        try:
            plan = plan_row(schedule, now)
        except (EvertickError, ValueError, KeyError, TypeError, OverflowError, ArithmeticError) as error:
            await _quarantine(conn, schedule, error, quarantined)
        else:
            plans += [plan] if plan else []
    settled = await _settle(conn, shard, epoch, plans, {s.schedule_id: s for s in due}, quarantined)
    return Fired(
        settled=settled,
        was_due=len(due),
        lag_seconds=_lag(due, now),
        quarantined=tuple(quarantined),
    )


async def _settle(
    conn: AsyncConnection,
    shard: int,
    epoch: int,
    plans: list[JsonObject],
    due: dict[int, DueSchedule],
    quarantined: list[int],
) -> int:
    """Settle all at once; if the database refuses, halve until the one that it refuses stands alone."""
    if not plans:
        return 0
    try:
        return len(await retry_on_deadlock(lambda: schedules.fire(conn, shard=shard, epoch=epoch, plans=plans)))
    except psycopg.Error as error:
        if error.sqlstate == NOT_LEADER:
            raise NotLeader(f"epoch {epoch} of shard {shard} is over; nothing was fired") from error
        if not isinstance(error, POISON):
            raise
        if len(plans) == 1:
            await _quarantine(conn, due[int(str(plans[0]["schedule_id"]))], error, quarantined)
            return 0
    middle = len(plans) // 2
    first = await _settle(conn, shard, epoch, plans[:middle], due, quarantined)
    return first + await _settle(conn, shard, epoch, plans[middle:], due, quarantined)


async def _quarantine(conn: AsyncConnection, schedule: DueSchedule, error: Exception, quarantined: list[int]) -> None:
    await schedules.quarantine(
        conn,
        schedule_id=schedule.schedule_id,
        version=schedule.version,
        error=f"{type(error).__name__}: {error}. Publish a corrected schedule to clear this.",
    )
    quarantined.append(schedule.schedule_id)


def _lag(due: list[DueSchedule], now: datetime) -> float:
    return max((now - due[0].next_due).total_seconds(), 0.0)
