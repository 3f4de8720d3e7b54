"""When a runner asks who has waited too long, instead of just who is most urgent. In memory only; nothing depends on it.

Never twice in a row, so that a long line of old work never gets more than every second place; and a few times per second,
because looking at the head of every line costs ten look-ups, and nobody waits for less than seconds.
"""

from __future__ import annotations

LOOK_SECONDS = 0.25


class FairTurns:
    """One runner's. Times are seconds of any clock that only goes forward; an ageing of 0 is strict priority."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._was_fair = False
        self._looked_at = -LOOK_SECONDS

    def take(self, now: float) -> float | None:
        """The ageing of this claim, or None for one in strict order."""
        is_fair = self._aging_seconds > 0 and not self._was_fair and now - self._looked_at >= LOOK_SECONDS
        self._was_fair = is_fair
        if is_fair:
            self._looked_at = now
        return self._aging_seconds if is_fair else None
