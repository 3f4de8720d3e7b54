"""clear: tasks of a run are taken back so that they run again. A running one is asked to stop first."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from psycopg import AsyncConnection

from evertick.domain.errors import NotFound
from evertick.engine.cancel import find_run
from evertick.store import tasks
from evertick.store.db import retry_on_deadlock
from evertick.store.tasks import Cleared, TaskRow

MOST_TASKS = 100_000


async def select_tasks(
    conn: AsyncConnection,
    *,
    run_id: int,
    names: Collection[str] = (),
    only_failed: bool = False,
    with_downstream: bool = False,
) -> list[TaskRow]:
    """The tasks that a clear would touch: all of the run, or those named, with what comes after them if asked."""
    run = await find_run(conn, run_id)
    rows = await tasks.list_of_run(conn, run_id=run_id, limit=MOST_TASKS)
    chosen = {row.idx for row in rows if not names or row.task in names}
    for name in names:
        if all(row.task != name for row in rows):
            near = difflib.get_close_matches(name, [row.task for row in rows], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" `evertick tasks list {run_id}` shows them."
            raise NotFound(f"Run {run_id} of {run.dag} has no task {name!r}.{hint}")
    if only_failed:
        chosen = {
            row.idx for row in rows if row.idx in chosen and row.state in ("failed", "canceled", "upstream_failed")
        }
    if with_downstream or only_failed:
        chosen |= set(await tasks.downstream(conn, version_id=run.version_id, idxs=sorted(chosen)))
    return [row for row in rows if row.idx in chosen]


async def clear(conn: AsyncConnection, *, run_id: int, chosen: Collection[TaskRow], actor: str) -> Cleared:
    idxs = sorted({row.idx for row in chosen})
    cleared = await retry_on_deadlock(lambda: tasks.clear(conn, run_id=run_id, idxs=idxs, actor=actor))
    if cleared is None:
        raise NotFound(f"There is no run {run_id} any more: it was pruned. `evertick runs list` shows what there is.")
    return cleared
