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

_CODES = {
    1: "error conflict lease_lost delivery_failed result_lost report_refused storage_unavailable not_leader refused "
    "provider_unavailable forbidden too_many stale executor_unavailable executor_busy environment_failed",
    2: "invalid invalid_dag broken_files invalid_params invalid_schedule invalid_routing invalid_settings secret_locked "
    "invalid_template bad_choice not_found too_large submission_refused",
    4: "unanswered postgres_unavailable schema_mismatch migration_blocked wrong_server answer_lost",
}
EXIT_STATUS: Mapping[str, int] = {code: status for status, codes in _CODES.items() for code in codes.split()}

RUN_EXIT_STATUS: Mapping[str, int] = {RunState.SUCCESS: 0, RunState.FAILED: 1, RunState.CANCELED: 3}


def foreseen(error: BaseException) -> EvertickError | None:
    """The error that was raised on purpose, also from inside a task group; nothing if this is a fault of the program."""
    if isinstance(error, EvertickError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [foreseen(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return None
