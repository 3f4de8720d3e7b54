"""Decides the next action for a submitted attempt, from its row in the work list and its status at the executor. No
I/O.

Never decides from an old listing: an attempt that is missing there is looked up by name first.
"""

from __future__ import annotations

from enum import StrEnum

from evertick.execution.remote import Observed, Phase
from evertick.store.dispatch import DispatchRow

# A running agent calls the API at once: one that has not started for this long cannot reach it.
SPEECHLESS_SECONDS = 30.0


class Chore(StrEnum):
    """`submit`: give it to the executor. `clean`: the attempt is over, delete what is left of it. `see_off`: its agent
    has reported the outcome and is exiting. `stop`: a stop was requested before it started. `end`: it ended at the
    executor before it started. `lose`: it was not seen for too long. `report`: it ran and ended at the executor.
    `force`: it did not stop in time."""

    SUBMIT = "submit"
    CLEAN = "clean"
    SEE_OFF = "see_off"
    STOP = "stop"
    END = "end"
    LOSE = "lose"
    REPORT = "report"
    FORCE = "force"


def chore_for(
    row: DispatchRow, seen: Observed | None, *, lost_after_seconds: float, asked_seconds: float, grace_seconds: float
) -> Chore | None:
    """`asked_seconds`: for how long the stop or the end of the attempt has been known."""
    has_ended = seen is not None and seen.phase is Phase.ENDED
    if row.state is None:
        if not row.has_finished or has_ended or asked_seconds > grace_seconds:
            return Chore.CLEAN
        # An object deleted before it has ended counts as killed, and is not kept for inspection.
        return Chore.SEE_OFF if seen is None else None
    if row.state == "running":
        if has_ended:
            return Chore.REPORT
        return Chore.FORCE if row.request is not None and asked_seconds > grace_seconds else None
    if row.request is not None:
        return Chore.STOP
    if has_ended:
        return Chore.END
    if not row.is_submitted:
        is_due = row.retry_seconds is None or row.retry_seconds <= 0
        return Chore.SUBMIT if is_due else None
    is_late = row.tried_seconds is not None and row.tried_seconds > lost_after_seconds
    return Chore.LOSE if seen is None and is_late else None


def trouble_of(row: DispatchRow, seen: Observed | None, *, running_seconds: float, api_url: str) -> str | None:
    """Why a submitted attempt has not started, for people. `running_seconds`: for how long the executor has reported it
    as running."""
    if row.state != "queued" or not row.is_submitted or seen is None:
        return None
    if seen.phase is Phase.WAITING:
        return seen.reason
    if seen.phase is not Phase.RUNNING or running_seconds < SPEECHLESS_SECONDS:
        return None
    return (
        f"it is running at the executor but does not reach the API at {api_url}. Check that this address is reachable from there"
        " (EVERTICK_AGENT_API_URL of the runner), and see its own output. Once that is fixed, clear the task to start it again"
    )
