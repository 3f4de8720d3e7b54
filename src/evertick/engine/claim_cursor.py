"""Where in line a runner begins to look for work, so that a claim's cost does not grow with the rows that are gone.

Rows that were claimed lie dead at the head of the line until vacuum may remove them, which an old snapshot anywhere in the
server forbids. The cursor passes over them. It only ever saves time: what lies before it is found by the next full look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from evertick.domain.fairness import RANKS
from evertick.engine.fair_turns import FairTurns
from evertick.store.dispatch import QueuedRow
from evertick.store.tasks import Look, StepRow

# A place in line is given before the transaction that fills it commits, and a claim passes over what another has locked;
# so the cursor stays this far behind, which almost no transaction outlasts, and a full look finds what does.
LAG_SECONDS = 2.0
FULL_LOOK_SECONDS = 5.0
# When there is nothing after the cursor, somebody may wait before it.
EMPTY_LOOK_SECONDS = 1.0


class ClaimCursor:
    """One runner's. Times are seconds of any clock that only goes forward. An ageing of 0 is strict priority."""

    def __init__(self, queue_count: int, *, aging_seconds: float = 0.0) -> None:
        self._turns = FairTurns(aging_seconds)
        self._low = [0] * (RANKS * queue_count)
        self._claimed: deque[tuple[float, int, int]] = deque()
        self._looked_at = -FULL_LOOK_SECONDS
        self._came_back_empty = False

    def begin(self, now: float) -> Look:
        """Where to look, and by which order."""
        return Look(self._begin(now), self._turns.take(now))

    def _begin(self, now: float) -> list[int] | None:
        """For each queue and rank the first place to look at; None for a look at everything."""
        limit = EMPTY_LOOK_SECONDS if self._came_back_empty else FULL_LOOK_SECONDS
        if now - self._looked_at >= limit:
            self._looked_at = now
            return None
        while self._claimed and now - self._claimed[0][0] >= LAG_SECONDS:
            _, place, seq = self._claimed.popleft()
            self._low[place] = max(self._low[place], seq)
        return self._low

    def learn(self, claims: Sequence[StepRow | QueuedRow], *, wanted: int, now: float) -> None:
        """What a look that wanted so many found."""
        self._came_back_empty = len(claims) < wanted
        newest = {claim.place: claim.seq for claim in claims}
        self._claimed.extend((now, place, seq) for place, seq in newest.items())
