"""note: a user attaches a note to a run or a task, or removes it."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, UserError
from evertick.store import listing
from evertick.store.db import retry_on_deadlock

LONGEST_NOTE = 1000


async def write_note(conn: AsyncConnection, key: TaskKey, *, content: str | None, actor: str) -> None:
    """For a run as a whole, the key has -1 twice. None removes the note."""
    if content is not None and (len(content) > LONGEST_NOTE or "\0" in content):
        raise UserError(f"A note must have at most {LONGEST_NOTE} characters, and no NUL.")
    done = await retry_on_deadlock(lambda: listing.put_note(conn, **key._asdict(), content=content, actor=actor))
    if not done:
        raise NotFound(f"There is no run {key.run_id}. List runs with `evertick runs list`.")


def of_run(run_id: int) -> TaskKey:
    return TaskKey(run_id, -1, -1)
