"""An error for the caller of the program: one line for people, one exit status for scripts.

The only place that knows exit statuses. Loaded by every command, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping

from evertick.domain.errors import EvertickError
from evertick.domain.states import RunState

# 0 done, 1 failed, 2 bad input, 3 canceled, 4 no usable database, 124 timeout (as `timeout` has it), 130 Ctrl-C.
TIMED_OUT = 124
INTERRUPTED = 130

EXIT_STATUS: Mapping[str, int] = {
    "error": 1,
    "conflict": 1,
    "lease_lost": 1,
    "delivery_failed": 1,
    "result_lost": 1,
    "storage_unavailable": 1,
    "not_leader": 1,
    "invalid": 2,
    "invalid_dag": 2,
    "invalid_params": 2,
    "invalid_schedule": 2,
    "invalid_routing": 2,
    "invalid_settings": 2,
    "secret_locked": 2,
    "invalid_template": 2,
    "bad_choice": 2,
    "not_found": 2,
    "refused": 1,
    "forbidden": 1,
    "too_many": 1,
    "too_large": 2,
    "stale": 1,
    "unanswered": 4,
    "submission_refused": 2,
    "executor_unavailable": 1,
    "executor_busy": 1,
    "postgres_unavailable": 4,
    "schema_mismatch": 4,
    "migration_blocked": 4,
    "wrong_server": 4,
    "answer_lost": 4,
}

RUN_EXIT_STATUS: Mapping[str, int] = {RunState.SUCCESS: 0, RunState.FAILED: 1, RunState.CANCELED: 3}


def foreseen(error: BaseException) -> EvertickError | None:
    """The error that was raised on purpose, also from inside a task group; nothing if this is a fault of the program."""
    if isinstance(error, EvertickError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [foreseen(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return None
