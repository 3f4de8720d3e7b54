"""Fairness between ready lists: which head has waited so long that it is served before more urgent work. Pure.

There is one ready list per queue and priority. Its place is 10 x the position of its queue in the runner's order, plus its rank:
0 for priority 9, to 9 for priority 0. Mirrors the SQL function `overdue`; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping

# Priorities 9 to 0 as ranks 0 to 9: one ready list for each, in each queue.
RANKS = 10


def overdue(waited_seconds: Mapping[int, float], aging_seconds: float) -> list[int]:
    """The places whose heads are served first, the most overdue first. `waited_seconds` is how long each head has waited.

    A head may wait `aging_seconds` for each level between it and the list that would be served next. A list in another
    queue of the same runner, which is later by queue order alone, counts as at least one level away.
    """
    if not waited_seconds:
        return []
    first = min(waited_seconds)
    late = {
        place: waited - aging_seconds * _levels_between(first, place)
        for place, waited in waited_seconds.items()
        if place != first
    }
    return sorted((place for place in late if late[place] > 0), key=lambda place: (-late[place], place))


def _levels_between(first: int, place: int) -> int:
    levels = place % RANKS - first % RANKS
    return levels if place // RANKS == first // RANKS else max(1, levels)
