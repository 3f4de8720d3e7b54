"""delete_run: somebody takes a run away for good, as retention would later. One that is not over yet must be canceled first."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import Conflict, NotFound
from evertick.store import runs
from evertick.store.db import retry_on_deadlock


async def delete_run(conn: AsyncConnection, *, run_id: int, actor: str) -> None:
    done = await retry_on_deadlock(lambda: runs.delete(conn, run_id=run_id, actor=actor))
    if done is None:
        raise NotFound(f"There is no run {run_id}. `evertick runs list` shows what there is.")
    if done == "open":
        raise Conflict(f"Run {run_id} is not over yet: cancel it first.")
