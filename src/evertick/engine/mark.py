"""mark: somebody decides how a task ended. A running one is stopped first; what it had blocked is decided again."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, UserError
from evertick.domain.states import TaskState
from evertick.store import tasks
from evertick.store.db import retry_on_deadlock

MARKABLE = (TaskState.SUCCESS, TaskState.FAILED, TaskState.SKIPPED)


async def mark(conn: AsyncConnection, key: TaskKey, *, state: str, actor: str) -> str:
    """'marked', or 'asked' when the task runs and moves once it has stopped."""
    if state not in MARKABLE:
        raise UserError(f"A task cannot be marked {state!r}; it can be marked {', '.join(MARKABLE)}.")
    answer = await retry_on_deadlock(lambda: tasks.mark(conn, key, state=state, actor=actor))
    if answer is None:
        raise Conflict(f"Task {key.idx} of run {key.run_id} is {state} already, or the run does not have it.")
    return answer
