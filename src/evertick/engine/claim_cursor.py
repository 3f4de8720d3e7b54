"""Where in the queue a runner starts to look for work, so that the cost of a claim does not grow with the number of dead rows.

Claimed rows remain dead at the head of the queue until vacuum may remove them, which an old snapshot anywhere in the
server prevents. The cursor skips them. It only saves time: the next full scan finds everything before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from evertick.domain.fairness import RANKS
from evertick.engine.fair_turns import FairTurns
from evertick.store.dispatch import QueuedRow
from evertick.store.tasks import Look, StepRow

# A position in the queue is assigned before the transaction that fills it commits, and a claim skips rows locked by others;
# so the cursor stays this far behind, which almost no transaction outlasts, and a full scan finds the rest.
LAG_SECONDS = 2.0
FULL_LOOK_SECONDS = 5.0
# If there is nothing after the cursor, a task may wait before it.
EMPTY_LOOK_SECONDS = 1.0


class ClaimCursor:
    """One runner's cursor. Times are seconds of any monotonic clock. An ageing of 0 is strict priority."""

    def __init__(self, queue_count: int, *, aging_seconds: float = 0.0) -> None:
        self._turns = FairTurns(aging_seconds)
        self._low = [0] * (RANKS * queue_count)
        self._claimed: deque[tuple[float, int, int]] = deque()
        self._looked_at = -FULL_LOOK_SECONDS
        self._came_back_empty = False

    def begin(self, now: float) -> Look:
        """Where to start, and in which order."""
        return Look(self._begin(now), self._turns.take(now))

    def _begin(self, now: float) -> list[int] | None:
        """For each queue and rank the first position to read; None for a full scan."""
        limit = EMPTY_LOOK_SECONDS if self._came_back_empty else FULL_LOOK_SECONDS
        if now - self._looked_at >= limit:
            self._looked_at = now
            return None
        while self._claimed and now - self._claimed[0][0] >= LAG_SECONDS:
            _, place, seq = self._claimed.popleft()
            self._low[place] = max(self._low[place], seq)
        return self._low

    def learn(self, claims: Sequence[StepRow | QueuedRow], *, wanted: int, now: float) -> None:
        """Record the result of a claim that wanted `wanted` tasks."""
        self._came_back_empty = len(claims) < wanted
        newest = {claim.place: claim.seq for claim in claims}
        self._claimed.extend((now, place, seq) for place, seq in newest.items())
