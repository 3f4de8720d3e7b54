"""How a session stands with the database: when it was last heard, and whether it knows what it has claimed. No I/O.

Times are seconds since boot, and count from the moment that something which was answered had been sent.
"""

from __future__ import annotations

# What must not outlive its contact is stopped when a sixth of the silence that gives a runner up is still to come.
STOP_AFTER = 5 / 6
# Others may soon take us for lost: no time to begin something new.
CLAIM_WITHIN = 1 / 2
# Waiting for a lock the server gives up after five seconds; hardly anything else makes a step last.
LONGEST_STEP_SECONDS = 6.0


class Contact:
    def __init__(self, lost_after_seconds: float, *, now: float) -> None:
        self._lost_after_seconds = lost_after_seconds
        self._heard_at = now
        self._unsure_since: float | None = None
        self.stepping_since: float | None = None

    def may_claim(self, now: float) -> bool:
        """Not while it is uncertain what was claimed, or whether others see us alive."""
        return self._unsure_since is None and now - self._heard_at <= CLAIM_WITHIN * self._lost_after_seconds

    @property
    def is_certain(self) -> bool:
        """Whether it is known what was claimed."""
        return self._unsure_since is None and self.stepping_since is None

    @property
    def stop_at(self) -> float:
        """When to stop what must not run beside a successor: nobody can take it from us before."""
        return self._heard_at + STOP_AFTER * self._lost_after_seconds

    def note_heard(self, sent_at: float) -> bool:
        """Whether that is the latest that is known."""
        is_latest = sent_at >= self._heard_at
        self._heard_at = max(self._heard_at, sent_at)
        return is_latest

    def doubt(self, now: float) -> None:
        """A claim's reply was lost: claiming again could hold more than there are slots (K8)."""
        self._unsure_since = now

    def settle_doubt(self, sent_at: float) -> bool:
        """A heartbeat has told what we hold. Whether there was a doubt that this settles."""
        if self._unsure_since is None or sent_at <= self._unsure_since:
            return False
        self._unsure_since = None
        return True

    def is_step_suspect(self, sent_at: float) -> bool:
        """Whether a step waits for its reply since long before something later was answered."""
        return self.stepping_since is not None and sent_at - self.stepping_since > LONGEST_STEP_SECONDS
