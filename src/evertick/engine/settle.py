"""The first part of every change of schedules: decide the due fires, and make sure that nothing changed in between.

A change is planned from the rows as read, and applied only if the cursors are still the same; otherwise it is planned again.
So an edit, a pause or a delete neither loses a fire nor causes one, whatever the leader does meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

import psycopg
from psycopg import AsyncConnection

from evertick.domain.errors import Conflict
from evertick.domain.zones import EPOCH
from evertick.engine.plan import JsonObject, is_last
from evertick.store import schedules, shards
from evertick.store.db import retry_on_deadlock
from evertick.store.schedules import DagSchedule, ScheduleChange

MOVED = "EV002"
# A schedule fires at most twenty times a second, and a change takes milliseconds: this many conflicts mean heavy contention.
_MOST_TRIES = 100

T = TypeVar("T")
Planner = Callable[[DagSchedule, datetime], JsonObject | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The state of the schedules at `now`, and their due fires: few enough to be decided by the change itself."""

    now: datetime
    rows: list[DagSchedule]
    plans: list[JsonObject]

    @property
    def seen(self) -> list[list[object]]:
        return [
            [row.schedule_id, row.version, _microseconds(row.next_due), row.paused, row.error is not None]
            for row in self.rows
        ]

    def change(self, dag_id: int, actor: str, expected: int | None) -> ScheduleChange:
        return ScheduleChange(dag_id=dag_id, actor=actor, expected=expected, seen=self.seen, settle=self.plans)


async def read_before(conn: AsyncConnection, *, dag: str, plan: Planner, name: str | None = None) -> Before:
    """Read the DAG's schedules, or the one of that name. Of a long backlog all but the last part is decided immediately."""
    while True:
        now = await shards.read_clock(conn)
        rows = await schedules.of_dag(conn, dag=dag, name=name)
        plans = [each for row in rows if (each := plan(row, now))]
        more = [each for each in plans if not is_last(each, now)]
        if not more:
            return Before(now=now, rows=rows, plans=plans)
        await schedules.settle(conn, plans=more)


async def until_unmoved(change: Callable[[], Awaitable[T]]) -> T:
    """Plan and apply a change, and repeat it whenever a fire or another change came in between."""
    for _ in range(_MOST_TRIES):
        try:
            return await retry_on_deadlock(change)
        except psycopg.Error as error:
            if error.sqlstate != MOVED:
                raise
    raise Conflict("The schedules change faster than this change can be made. Nothing was changed: try again.")


def _microseconds(instant: datetime | None) -> int | None:
    return None if instant is None else (instant - EPOCH) // timedelta(microseconds=1)
