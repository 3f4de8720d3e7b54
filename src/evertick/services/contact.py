"""A session's database liveness: when the database last answered, and whether the session knows what it has claimed. No
I/O.

Times are seconds since boot, and count from the moment an answered request was sent.
"""

from __future__ import annotations

# Attempts that must not outlive their lease are stopped after 5/6 of the silence that declares a runner dead.
STOP_AFTER = 5 / 6
# Other processes may soon declare this runner dead: do not start new work.
CLAIM_WITHIN = 1 / 2
# The server's lock timeout is five seconds; hardly anything else makes an exchange take long.
LONGEST_STEP_SECONDS = 6.0


class Contact:
    def __init__(self, lost_after_seconds: float, *, now: float) -> None:
        self._lost_after_seconds = lost_after_seconds
        self._heard_at = now
        self._unsure_since: float | None = None
        self.stepping_since: float | None = None

    def may_claim(self, now: float) -> bool:
        """Not while it is unknown what was claimed, or whether other processes see this runner alive."""
        return self._unsure_since is None and now - self._heard_at <= CLAIM_WITHIN * self._lost_after_seconds

    @property
    def is_certain(self) -> bool:
        """Whether it is known what was claimed."""
        return self._unsure_since is None and self.stepping_since is None

    @property
    def stop_at(self) -> float:
        """When to stop attempts that must not run at the same time as a successor: they cannot be taken away before."""
        return self._heard_at + STOP_AFTER * self._lost_after_seconds

    def note_heard(self, sent_at: float) -> bool:
        """Returns whether this is the latest answer so far."""
        is_latest = sent_at >= self._heard_at
        self._heard_at = max(self._heard_at, sent_at)
        return is_latest

    def doubt(self, now: float) -> None:
        """A claim's reply was lost: claiming again could hold more attempts than there are slots (K8)."""
        self._unsure_since = now

    def settle_doubt(self, sent_at: float) -> bool:
        """A heartbeat listed the attempts that this session holds. Returns whether that resolved a doubt."""
        if self._unsure_since is None or sent_at <= self._unsure_since:
            return False
        self._unsure_since = None
        return True

    def is_step_suspect(self, sent_at: float) -> bool:
        """Whether an exchange has waited for its reply since long before a later request was answered."""
        return self.stepping_since is not None and sent_at - self.stepping_since > LONGEST_STEP_SECONDS
