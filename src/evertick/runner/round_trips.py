"""How many tasks a runner far away claims in advance: twice as many as end within a round trip.

As many would keep it at the rate that it has. With 200 ms to the API, 32 slots that wait for an answer after each task
finish at most 160 tasks a second, however short the tasks are. Long tasks are never claimed in advance, because none of them
ends within a round trip.
"""

from __future__ import annotations

# Below, a round trip is no loss; and the weight of the latest exchange.
SHORTEST_SECONDS, WEIGHT = 0.03, 0.3
# A runner far away holds at most so many times its slots.
MOST_HELD = 4
AHEAD = 2


class RoundTrips:
    """Times are seconds of any monotonic clock."""

    def __init__(self, slots: int) -> None:
        self._most = (MOST_HELD - 1) * slots
        self._seconds = self._rate = self._ended_at = 0.0

    def note(self, ended: int, began_at: float, ended_at: float) -> int:
        """An exchange reported so many attempts. Returns how many tasks to claim in advance."""
        seconds, since = ended_at - began_at, max(ended_at - self._ended_at, 0.001)
        self._ended_at = ended_at
        self._seconds += WEIGHT * (seconds - self._seconds)
        self._rate += WEIGHT * (ended / since - self._rate)
        return 0 if self._seconds < SHORTEST_SECONDS else min(self._most, int(AHEAD * self._rate * self._seconds))
