"""pause, unpause and delete of one schedule, by compare-and-set (V12). Its DAG and its other schedules continue.

From then on the user owns the schedule, not the code: publishing leaves it unchanged until it is reset (`reset`).
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.errors import NotFound
from evertick.engine.catch_up import NOTHING, CatchUp
from evertick.engine.plan import JsonObject, plan_end, plan_if_possible
from evertick.engine.put_schedule import conflict, put_schedule
from evertick.engine.settle import Planner, read_before, until_unmoved
from evertick.engine.trigger import find_dag, find_dag_row
from evertick.store import schedules
from evertick.store.schedules import DagSchedule


async def pause_schedule(
    conn: AsyncConnection, *, dag: str, name: str, actor: str, expected_version: int | None = None
) -> int:
    """Its new version. Due fires are decided first."""
    return await _change(conn, "pause", dag, name, actor, expected_version, plan_if_possible)


async def unpause_schedule(
    conn: AsyncConnection,
    *,
    dag: str,
    name: str,
    actor: str,
    expected_version: int | None = None,
    catch_up: CatchUp = NOTHING,
) -> int:
    """Its new version. While its DAG is paused, it stays paused with it."""

    def plan(schedule: DagSchedule, now: datetime) -> JsonObject | None:
        # Applied under the version that this change gives the schedule.
        if not schedule.is_held:
            return None
        return catch_up.plan(replace(schedule, version=schedule.version + 1), now)

    return await _change(conn, "unpause", dag, name, actor, expected_version, plan)


async def delete_schedule(
    conn: AsyncConnection, *, dag: str, name: str, actor: str, expected_version: int | None = None
) -> int:
    """Its last version. Due fires are decided first; its runs and its history stay."""
    return await _change(conn, "delete", dag, name, actor, expected_version, plan_end)


async def reset_schedule(conn: AsyncConnection, *, dag: str, name: str, actor: str) -> bool:
    """Give a schedule back to the code: as the DAG's file declares it, or deleted if it does not. Returns whether it exists."""
    _, spec = await find_dag(conn, dag)
    declared = next((each for each in spec.schedules if each.name == name), None)
    if declared is None:
        await delete_schedule(conn, dag=dag, name=name, actor=actor)
        return False
    await put_schedule(conn, dag=dag, schedule=declared, actor=actor, origin="code")
    return True


async def find_schedule(conn: AsyncConnection, dag: str, name: str) -> DagSchedule:
    """The schedule, or an error that suggests a similar name."""
    found = await schedules.of_dag(conn, dag=dag)
    for each in found:
        if each.name == name:
            return each
    names = [each.name for each in found]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else f" It has: {', '.join(names[:10]) or 'none'}."
    raise NotFound(f"DAG {dag!r} has no schedule {name!r}.{hint}")


async def _change(
    conn: AsyncConnection, change: str, dag: str, name: str, actor: str, expected: int | None, plan: Planner
) -> int:
    row = await find_dag_row(conn, dag)
    await find_schedule(conn, dag, name)

    async def once() -> int | None:
        before = await read_before(conn, dag=dag, name=name, plan=plan)
        return await schedules.change(conn, before.change(row.dag_id, actor, expected), name=name, change=change)

    version = await until_unmoved(once)
    if version is None:
        raise await conflict(conn, dag=dag, name=name, expected=expected)
    return version
