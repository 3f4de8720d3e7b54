"""put_schedule: one schedule of a DAG is created or changed by compare-and-set; a stale writer gets a conflict (V12).

Fires that are due under the old version are decided first, in the same transaction.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.dag import NamedSchedule
from evertick.domain.errors import Conflict
from evertick.engine.plan import plan_end
from evertick.engine.publish import schedule_row
from evertick.engine.refuse_loops import refuse_loops
from evertick.engine.settle import read_before, until_unmoved
from evertick.engine.trigger import find_dag
from evertick.store import schedules


async def put_schedule(
    conn: AsyncConnection,
    *,
    dag: str,
    schedule: NamedSchedule,
    actor: str,
    expected_version: int | None = None,
    request: str | None = None,
    origin: str = "user",
) -> int:
    """The schedule's new version. `expected_version` 0 means that it must not exist; None overwrites any.

    A `request` id makes a call that is repeated after a lost reply one change. The origin "code" returns it to the code.
    """
    row, spec = await find_dag(conn, dag)
    await refuse_loops(
        conn,
        dag=dag,
        wanted=[schedule],
        outlets={asset for task in spec.tasks for asset in task.outlets},
        stays=lambda wait: wait.name != schedule.name,
    )

    async def once() -> int | None:
        before = await read_before(conn, dag=dag, name=schedule.name, plan=plan_end)
        old = before.rows[0] if before.rows else None
        made = before.change(row.dag_id, actor, expected_version)
        wanted = schedule_row(spec, schedule, before.now, old=old)
        return await schedules.put(conn, made, schedule=wanted, request=request, origin=origin)

    version = await until_unmoved(once)
    if version is None:
        raise await conflict(conn, dag=dag, name=schedule.name, expected=expected_version)
    return version


async def conflict(conn: AsyncConnection, *, dag: str, name: str, expected: int | None) -> Conflict:
    """The error for a writer whose version is outdated."""
    found = [each.version for each in await schedules.of_dag(conn, dag=dag, name=name)]
    stands = f"is at version {found[0]}" if found else "does not exist"
    return Conflict(f"Schedule {name!r} of {dag} {stands}, not at {expected}. Read it again and repeat the change.")
