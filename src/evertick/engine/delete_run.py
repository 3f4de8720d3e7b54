"""delete_run: a user deletes a run permanently, as retention would do later. An open run must be canceled first."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import Conflict, NotFound
from evertick.store import runs
from evertick.store.db import retry_on_deadlock


async def delete_run(conn: AsyncConnection, *, run_id: int, actor: str) -> None:
    done = await retry_on_deadlock(lambda: runs.delete(conn, run_id=run_id, actor=actor))
    if done is None:
        raise NotFound(f"There is no run {run_id}. List runs with `evertick runs list`.")
    if done == "open":
        raise Conflict(f"Run {run_id} has not ended: cancel it first.")
