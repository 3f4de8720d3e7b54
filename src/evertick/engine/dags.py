"""pause, unpause and delete of a DAG. Due fires are decided first; a pause skips fires and records them, so that an
unpaused schedule continues with its next fire after now, unless the user asks for the missed ones.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.engine.fire_schedules import plan_end, plan_if_possible
from evertick.engine.runs import find_dag_row
from evertick.engine.schedules import NOTHING, CatchUp, read_snapshot, retry_if_changed


async def pause(conn: AsyncConnection, *, dag: str, actor: str) -> bool:
    """Whether it was active before."""
    row = await find_dag_row(conn, dag)

    async def once() -> bool:
        before = await read_snapshot(conn, dag=dag, plan=plan_if_possible)
        return await dags.pause(
            conn, dag_id=row.dag_id, paused=True, seen=before.seen, settle=before.plans, actor=actor
        )

    return await retry_if_changed(once)


async def unpause(conn: AsyncConnection, *, dag: str, actor: str, catch_up: CatchUp = NOTHING) -> bool:
    """Whether it was paused before."""
    row = await find_dag_row(conn, dag)

    async def once() -> bool:
        before = await read_snapshot(
            conn, dag=dag, plan=lambda each, now: None if each.is_held else catch_up.plan(each, now)
        )
        return await dags.pause(
            conn, dag_id=row.dag_id, paused=False, seen=before.seen, settle=before.plans, actor=actor
        )

    return await retry_if_changed(once)


async def delete(conn: AsyncConnection, *, dag: str, actor: str) -> bool:
    """Stop planning a DAG. Its history stays, and its open runs continue."""
    row = await find_dag_row(conn, dag)

    async def once() -> bool:
        before = await read_snapshot(conn, dag=dag, plan=plan_end)
        return await dags.delete(conn, dag_id=row.dag_id, seen=before.seen, settle=before.plans, actor=actor)

    return await retry_if_changed(once)
