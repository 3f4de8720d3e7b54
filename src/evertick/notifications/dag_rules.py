"""What the failure of a run or task does to its DAG: a notification is delivered to these functions, at least once."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.queries import runs, tasks
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict
from evertick.engine.dags import pause
from evertick.engine.runs import find_dag
from evertick.engine.tasks import mark

_ENDED = frozenset({"success", "failed", "skipped", "canceled", "upstream_failed"})
_MOST_TASKS = 10_000


async def pause_after_failures(conn: AsyncConnection, *, dag: str, most: int) -> str:
    """Pause a DAG whose last runs have all failed. A success since then keeps it active."""
    if not await runs.has_failed(conn, dag=dag, most=most):
        return f"its last {most} runs did not all fail"
    is_changed = await pause(conn, dag=dag, actor=Actor(f"{most} failed runs"))
    return f"{dag} is paused" if is_changed else f"{dag} was paused already"


async def fail_fast(conn: AsyncConnection, *, dag: str, run_id: int, task: str) -> str:
    """End what is open in a run of which a task has failed: running tasks fail, and others are skipped, except teardowns."""
    _, spec = await find_dag(conn, dag)
    teardowns = {each.name for each in spec.tasks if each.is_teardown}
    actor, ended = Actor(f"failure of {task}"), 0
    for row in await tasks.list_of_run(conn, run_id=run_id, limit=_MOST_TASKS):
        if row.state in _ENDED or row.request is not None or row.task in teardowns:
            continue
        state = "failed" if row.state in ("queued", "running") else "skipped"
        try:
            await mark(conn, TaskKey(run_id, row.task_index, row.map_index), state=state, actor=actor)
            ended += 1
        except Conflict:
            continue  # it ended meanwhile
    return f"{ended} tasks were ended"
