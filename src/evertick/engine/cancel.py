"""cancel: a user ends a run. Running tasks receive a stop request; the rest ends at once."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import Conflict, NotFound
from evertick.store import runs
from evertick.store.db import retry_on_deadlock
from evertick.store.runs import RunRow


async def cancel(conn: AsyncConnection, *, run_id: int, actor: str, reason: str | None = None) -> int:
    """The number of running tasks that received a stop request."""
    why = reason or f"canceled by {actor}"
    asked = await retry_on_deadlock(lambda: runs.cancel(conn, run_id=run_id, actor=actor, reason=why))
    if asked is None:
        run = await find_run(conn, run_id)
        raise Conflict(f"Run {run_id} of {run.dag} has already ended ({run.state}); there is nothing to cancel.")
    return asked


async def find_run(conn: AsyncConnection, run_id: int) -> RunRow:
    run = await runs.find(conn, run_id)
    if run is None:
        raise NotFound(f"There is no run {run_id}. List runs with `evertick runs list`.")
    return run
