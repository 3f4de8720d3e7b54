"""When a claim serves the most overdue tasks instead of the most urgent ones. In memory only; correctness does not depend on it.

Never twice in a row, so that a long backlog of old work gets at most every second slot; and a few times per second,
because reading the head of every list costs ten lookups, and fairness is measured in seconds.
"""

from __future__ import annotations

LOOK_SECONDS = 0.25


class FairTurns:
    """One runner's state. Times are seconds of any monotonic clock; an ageing of 0 is strict priority."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._was_fair = False
        self._looked_at = -LOOK_SECONDS

    def take(self, now: float) -> float | None:
        """The ageing of this claim, or None for strict order."""
        is_fair = self._aging_seconds > 0 and not self._was_fair and now - self._looked_at >= LOOK_SECONDS
        self._was_fair = is_fair
        if is_fair:
            self._looked_at = now
        return self._aging_seconds if is_fair else None
