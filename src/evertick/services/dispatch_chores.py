"""What is to be done about an attempt that was handed over, given what the work list and the executor say. Decides only; no I/O.

Nothing is given up because of an old look: what is not there is asked for by name before anything is decided by that.
"""

from __future__ import annotations

from enum import StrEnum

from evertick.execution.remote import Observed, Phase
from evertick.store.dispatch import DispatchRow

# An agent that runs asks the API at once: one that has not begun for so long does not reach it.
SPEECHLESS_SECONDS = 30.0


class Chore(StrEnum):
    """`submit`: hand it over. `clean`: the attempt is over, take away what is left. `see_off`: its agent has told how it ended, and
    is just leaving. `stop`: somebody asked for it before it began. `end`: it ended over there before it began. `lose`: nothing of
    it was seen for long. `report`: it ran and ended over there. `force`: it was asked to stop, and has not in time.
    """

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
    """`asked_seconds`: for how long we have known that it shall stop, or is over."""
    has_ended = seen is not None and seen.phase is Phase.ENDED
    if row.state is None:
        if not row.has_finished or has_ended or asked_seconds > grace_seconds:
            return Chore.CLEAN
        # Whatever is taken away before it has ended ends as one that was killed, and is not kept for people.
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
    """What keeps an attempt from beginning that was handed over, for people. `running_seconds`: for how long it was seen to run."""
    if row.state != "queued" or not row.is_submitted or seen is None:
        return None
    if seen.phase is Phase.WAITING:
        return seen.reason
    if seen.phase is not Phase.RUNNING or running_seconds < SPEECHLESS_SECONDS:
        return None
    return (
        f"it runs there and does not reach the API at {api_url}. Is that its address as seen from there (EVERTICK_AGENT_API_URL of"
        " the runner)? Its own output says more. Once that is right, clear the task, and it begins anew"
    )
