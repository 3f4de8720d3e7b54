"""put_schedule: one schedule of a DAG is created or changed by compare-and-set; a stale writer gets a conflict (V12).

Fires that are due under the old version are decided first, in the same transaction.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from psycopg import AsyncConnection

from evertick.domain.dag import DagSpec, NamedSchedule
from evertick.domain.dag_rules import check_run_params
from evertick.domain.errors import Conflict
from evertick.domain.jitter import delay_of
from evertick.domain.misfire import SkipRange, SkipReason, skip_until
from evertick.domain.schedule import ScheduleKind, ScheduleSpec, next_after
from evertick.domain.schedule_fields import EARLIEST
from evertick.engine.plan import JsonObject, plan_end, skip_row, spec_json
from evertick.engine.refuse_loops import refuse_loops
from evertick.engine.settle import read_before, until_unmoved
from evertick.engine.trigger import find_dag
from evertick.store import schedules
from evertick.store.schedules import DagSchedule

DEFAULT_WINDOW_SECONDS = 86_400.0


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


def schedule_row(spec: DagSpec, schedule: NamedSchedule, now: datetime, *, old: DagSchedule | None) -> JsonObject:
    """One schedule of the DAG as the tables hold it. It starts after `now`; if its instants stay and only its jitter
    or its policies change, it continues after the fires that were already due."""
    delay = delay_of(schedule.spec, dag=spec.name, name=schedule.name)
    keeps = old is not None and _pattern(old.spec) == _pattern(schedule.spec.to_json())
    first = next_after(schedule.spec, now - timedelta(seconds=old.delay_seconds) if old and keeps else now)
    window = spec.catchup_window_seconds if schedule.catchup_window_seconds is None else schedule.catchup_window_seconds
    return {
        "name": schedule.name,
        "spec": spec_json(schedule.spec),
        "params": check_run_params(spec, schedule.params),
        "misfire": schedule.misfire or spec.misfire,
        "window_seconds": DEFAULT_WINDOW_SECONDS if window is None else window,
        "catchup_limit": schedule.catchup_limit or spec.catchup_limit,
        "overlap": schedule.overlap or spec.overlap,
        "start_within": schedule.start_within_seconds or spec.start_within_seconds,
        "finish_within": schedule.finish_within_seconds or spec.finish_within_seconds,
        "delay_seconds": delay.total_seconds(),
        "next_due": (first + delay).isoformat() if first else None,
        "skipped": None if keeps else skip_row(_passed(schedule.spec, now)),
    }


def _pattern(text: str) -> object:
    """The part of a schedule that defines its instants, without the jitter."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return {name: value for name, value in raw.items() if name != "jitter_seconds"} if isinstance(raw, dict) else raw


def _passed(spec: ScheduleSpec, now: datetime) -> SkipRange | None:
    """The past instants of a schedule that lists its instants."""
    if spec.kind not in (ScheduleKind.ONCE, ScheduleKind.TIMES):
        return None
    return skip_until(spec, next_due=next_after(spec, EARLIEST), now=now, reason=SkipReason.PAST)
