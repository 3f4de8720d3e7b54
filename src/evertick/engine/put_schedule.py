"""put_schedule: one schedule of a DAG is created or changed by compare-and-set; a stale writer gets a conflict (V12).

What is due under the old version is settled first, in the same transaction.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.dag import NamedSchedule
from evertick.domain.errors import Conflict
from evertick.engine.plan import plan_if_possible
from evertick.engine.publish import schedule_row
from evertick.engine.trigger import find_dag
from evertick.store import schedules, shards
from evertick.store.db import retry_on_deadlock


async def put_schedule(
    conn: AsyncConnection,
    *,
    dag: str,
    schedule: NamedSchedule,
    actor: str,
    expected_version: int | None = None,
    request: str | None = None,
) -> int:
    """The schedule's version after this. `expected_version` 0 means that it must not exist; None overwrites any.

    A `request` id makes the same call after a lost reply one change.
    """
    row, spec = await find_dag(conn, dag)

    async def once() -> int | None:
        now = await shards.read_clock(conn)
        due = [each for each in await schedules.of_dag(conn, dag=dag) if each.name == schedule.name]
        plans = [plan for each in due if (plan := plan_if_possible(each, now))]
        return await schedules.put(
            conn,
            dag_id=row.dag_id,
            schedule=schedule_row(spec, schedule, now),
            expected=expected_version,
            request=request,
            settle=plans,
            actor=actor,
        )

    version = await retry_on_deadlock(once)
    if version is None:
        found = [each.version for each in await schedules.of_dag(conn, dag=dag) if each.name == schedule.name]
        stands = f"is at version {found[0]}" if found else "does not exist"
        raise Conflict(
            f"Schedule {schedule.name!r} of {dag} {stands}, not at {expected_version}. Read it again and repeat the change."
        )
    return version
