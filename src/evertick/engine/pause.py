"""pause, unpause and delete of a DAG. What is due is settled first; a pause skips on record, and runs nothing afterwards
as a surprise: an unpaused schedule goes on with its next fire after now.
"""

from __future__ import annotations

from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.misfire import skip_paused
from evertick.domain.schedule import next_after
from evertick.engine.plan import UNPLANNABLE, JsonObject, plan_if_possible, read_spec, skip_row
from evertick.engine.publish import plan_changed
from evertick.engine.trigger import find_dag_row
from evertick.store import dags, schedules, shards
from evertick.store.db import retry_on_deadlock
from evertick.store.schedules import DagSchedule


async def pause(conn: AsyncConnection, *, dag: str, actor: str) -> bool:
    """Whether it was running until now."""
    row = await find_dag_row(conn, dag)

    async def once() -> bool:
        now = await shards.read_clock(conn)
        found = [plan_if_possible(each, now) for each in await schedules.of_dag(conn, dag=dag)]
        settle = [plan for plan in found if plan]
        return await dags.pause(conn, dag_id=row.dag_id, paused=True, settle=settle, cursors=[], actor=actor)

    return await retry_on_deadlock(once)


async def unpause(conn: AsyncConnection, *, dag: str, actor: str) -> bool:
    """Whether it was paused until now."""
    row = await find_dag_row(conn, dag)

    async def once() -> bool:
        now = await shards.read_clock(conn)
        found = [_cursor_after_pause(each, now) for each in await schedules.of_dag(conn, dag=dag)]
        cursors = [cursor for cursor in found if cursor]
        return await dags.pause(conn, dag_id=row.dag_id, paused=False, settle=[], cursors=cursors, actor=actor)

    return await retry_on_deadlock(once)


async def delete(conn: AsyncConnection, *, dag: str, actor: str) -> bool:
    """Take a DAG out of planning. Its history stays, and its open runs go on."""
    row = await find_dag_row(conn, dag)

    async def once() -> bool:
        settle = await plan_changed(conn, dag, [], await shards.read_clock(conn))
        return await dags.delete(conn, dag_id=row.dag_id, settle=settle, actor=actor)

    return await retry_on_deadlock(once)


def _cursor_after_pause(schedule: DagSchedule, now: datetime) -> JsonObject | None:
    """Nothing for one that cannot be read: the scheduler sets it aside when it is due."""
    try:
        spec = read_spec(schedule.spec)
        following = next_after(spec, now)
    except UNPLANNABLE:
        return None
    return {
        "schedule_id": schedule.schedule_id,
        "version": schedule.version,
        "next_due": following.isoformat() if following else None,
        "skipped": skip_row(skip_paused(spec, next_due=schedule.next_due, now=now)),
    }
