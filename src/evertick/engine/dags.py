"""pause, unpause and delete of a DAG. Due fires are decided first; a pause skips fires and records them, so that an
unpaused schedule continues with its next fire after now, unless the user asks for the missed ones.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.engine.fire_schedules import plan_end, plan_if_possible
from evertick.engine.runs import find_dag_row
from evertick.engine.schedules import NOTHING, CatchUp, Planner, ScheduleSnapshot, change_schedules


@sql_function(retries=False)
async def pause_dag(conn: AsyncConnection, before: ScheduleSnapshot, *, paused: bool, actor: Actor) -> bool:
    """Whether anything changed."""


@sql_function(retries=False)
async def delete_dag(conn: AsyncConnection, before: ScheduleSnapshot, *, actor: Actor) -> bool: ...


async def pause(conn: AsyncConnection, *, dag: str, actor: Actor) -> bool:
    """Whether it was active before."""
    return await _set_paused(conn, dag, plan_if_possible, paused=True, actor=actor)


async def unpause(conn: AsyncConnection, *, dag: str, actor: Actor, catch_up: CatchUp = NOTHING) -> bool:
    """Whether it was paused before."""
    return await _set_paused(
        conn, dag, lambda each, now: None if each.is_held else catch_up.plan(each, now), paused=False, actor=actor
    )


async def _set_paused(conn: AsyncConnection, dag: str, plan: Planner, *, paused: bool, actor: Actor) -> bool:
    row = await find_dag_row(conn, dag)
    return await change_schedules(
        conn, lambda before: pause_dag(conn, before, paused=paused, actor=actor), dag=dag, plan=plan, dag_id=row.dag_id
    )


async def delete(conn: AsyncConnection, *, dag: str, actor: Actor) -> bool:
    """Stop planning a DAG. Its history stays, and its open runs continue."""
    row = await find_dag_row(conn, dag)
    return await change_schedules(
        conn, lambda before: delete_dag(conn, before, actor=actor), dag=dag, plan=plan_end, dag_id=row.dag_id
    )
