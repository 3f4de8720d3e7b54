"""Why a task is not running, by its name."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.explain import Explained
from evertick.engine.tasks import explain_row, select_tasks


async def explain(conn: AsyncConnection, *, run_id: int, task: str) -> Explained:
    (row, *_) = await select_tasks(conn, run_id=run_id, names=[task])
    return await explain_row(conn, row, run_id=run_id)
