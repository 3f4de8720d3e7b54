"""A schedule and plans for it as the scheduler would make them, with any field changed."""

from __future__ import annotations

from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.queries import schedules
from evertick.db.queries.schedules import DagSchedule
from evertick.db.queries.shards import read_clock
from evertick.engine.fire_schedules import _fire_schedules
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
    """How many won, by a clock by which all of them are due."""
    now = await read_clock(conn)
    await set_clock(conn, max([now, *(datetime.fromisoformat(str(each["expected"])) for each in plans)]))
    won = (await _fire_schedules(conn, shard=0, epoch=epoch, plans=list(plans))).won
    await set_clock(conn, now)
    return len(won)


async def plant(conn: AsyncConnection, name: str, count: int, *, due: float | datetime) -> None:
    """Schedules of the DAG "tick" that are due at that second, and then not for a day."""
    at = due if isinstance(due, datetime) else later(due)
    await conn.execute(
        """with made as (
               insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)
               select d.dag_id, %(name)s || n, 1, jsonb_build_object('kind', 'interval', 'timezone', 'UTC', 'every_seconds',
                      86400.0, 'anchor_at', %(anchor)s::text), '{}', 'latest', 86400, 'test', clock()
               from dag d cross join generate_series(1, %(count)s) n where d.name = 'tick'
               returning schedule_id)
           insert into schedule_state (schedule_id, shard, version, next_due)
           select schedule_id, 0, 1, %(due)s from made""",
        {"name": name, "count": count, "due": at, "anchor": at.isoformat()},
    )
