"""put_output: somebody puts a value in place of what a task returned, beside it by name, or takes one away."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound
from evertick.store import outputs
from evertick.store.db import retry_on_deadlock
from evertick.store.outputs import NewOutput


async def put_output(conn: AsyncConnection, key: TaskKey, new: NewOutput, *, actor: str) -> None:
    """Only of a task that has succeeded: another one could be about to return its own."""
    name = new.name or "what the task returned"
    done = await retry_on_deadlock(lambda: outputs.put(conn, key, new, actor=actor))
    if done is None:
        raise Conflict("Only a task that has succeeded has outputs to change: wait for its end, or mark it first.")
    if done == "exists":
        raise Conflict(f"There is {name!r} already: change it instead.")
    if done == "missing":
        raise NotFound(f"The task put out no {name!r}.")
