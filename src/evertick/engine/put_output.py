"""put_output: a user replaces a task's return value, adds a named output, or deletes one."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound
from evertick.store import outputs
from evertick.store.db import retry_on_deadlock
from evertick.store.outputs import NewOutput


async def put_output(conn: AsyncConnection, key: TaskKey, new: NewOutput, *, actor: str) -> None:
    """Only for a task that has succeeded: any other could be about to return its own value."""
    name = new.name or "the return value"
    done = await retry_on_deadlock(lambda: outputs.put(conn, key, new, actor=actor))
    if done is None:
        raise Conflict("Only the outputs of a succeeded task can be changed: wait for its end, or mark it first.")
    if done == "exists":
        raise Conflict(f"Output {name!r} already exists: change it instead.")
    if done == "missing":
        raise NotFound(f"The task has no output {name!r}.")
