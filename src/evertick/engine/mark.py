"""mark: a user sets the end state of a task. A running one is stopped first; its downstream tasks are decided again."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, UserError
from evertick.domain.states import TaskState
from evertick.store import tasks
from evertick.store.db import retry_on_deadlock

MARKABLE = (TaskState.SUCCESS, TaskState.FAILED, TaskState.SKIPPED)


async def mark(conn: AsyncConnection, key: TaskKey, *, state: str, actor: str) -> str:
    """'marked', or 'asked' if the task is running and is marked once it has stopped."""
    if state not in MARKABLE:
        raise UserError(f"A task cannot be marked {state!r}; use one of {', '.join(MARKABLE)}.")
    answer = await retry_on_deadlock(lambda: tasks.mark(conn, key, state=state, actor=actor))
    if answer is None:
        raise Conflict(f"Task {key.idx} of run {key.run_id} is already {state}, or the run has no such task.")
    return answer
