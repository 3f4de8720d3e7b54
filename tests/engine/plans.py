"""A schedule and plans for it as the scheduler would make them, with any field changed."""

from __future__ import annotations

from datetime import datetime

from psycopg import AsyncConnection

from evertick.store import schedules
from evertick.store.schedules import DagSchedule
from tests.engine.world import later, lead, make_dag, put, set_clock

ONE: dict[str, list[str]] = {"a": []}
JsonObject = dict[str, object]


async def scheduled(conn: AsyncConnection) -> tuple[int, DagSchedule]:
    """A leader, and a schedule that is due every minute from T0 + 60 s on."""
    await set_clock(conn, later(0))
    await put(conn, make_dag("one", ONE, every="@every 60s"))
    (schedule,) = await schedules.of_dag(conn, dag="one")
    return await lead(conn), schedule


def plan(schedule: DagSchedule, **changes: object) -> JsonObject:
    fields = {
        "schedule_id": schedule.schedule_id,
        "version": schedule.version,
        "expected": schedule.next_due,
        "fires": [later(60)],
        "last_fire": later(60),
        "skipped": {"first_at": later(1), "last_at": later(2), "count": 2, "reason": "test"},
        "next_due": later(120),
        **changes,
    }

    def text(field: object) -> object:
        if isinstance(field, datetime):
            return field.isoformat()
        if isinstance(field, dict):
            return {name: text(inner) for name, inner in field.items()}
        return [text(inner) for inner in field] if isinstance(field, list) else field

    return {name: text(field) for name, field in fields.items()}


async def fire_plan(conn: AsyncConnection, epoch: int, *plans: JsonObject) -> int:
    return len((await schedules.fire(conn, shard=0, epoch=epoch, plans=list(plans))).won)
