"""why: for a task that is not running, every reason, the most binding first; if it waits for another task, the reasons of that one.

Read-only. The reasons come from the functions that decide, at this moment.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.why import Explained, Reason
from evertick.engine.clear import select_tasks
from evertick.store import gates, tasks

# Longer chains are cut: the last task shown still says what it waits for.
LONGEST_CHAIN = 50


async def explain(conn: AsyncConnection, *, run_id: int, task: str) -> Explained:
    """Why this task is not running."""
    (row, *_) = await select_tasks(conn, run_id=run_id, names=[task])
    return await explain_row(conn, row, run_id=run_id)


async def explain_row(conn: AsyncConnection, row: tasks.TaskRow, *, run_id: int) -> Explained:
    """The same for a task that was already read, whatever the size of its run."""
    chain: list[tuple[tasks.TaskRow, list[Reason]]] = []
    while len(chain) < LONGEST_CHAIN:
        reasons = await gates.why(conn, TaskKey(run_id, row.idx, row.map_index))
        chain.append((row, reasons))
        above = next((reason for reason in reasons if reason.kind == "upstream"), None)
        found = await tasks.find(conn, TaskKey(run_id, above.detail["idx"], -1)) if above else None
        if found is None:
            break
        row = found
    explained: Explained | None = None
    for each, reasons in reversed(chain):
        explained = Explained(run_id=run_id, task=each.task, state=each.state, reasons=reasons, upstream=explained)
    assert explained is not None
    return explained
