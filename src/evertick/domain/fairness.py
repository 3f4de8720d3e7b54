"""Fairness between lines: whose head has waited so long that it goes before more urgent work. Pure.

A line is a priority of a queue. Its place is 10 x that of its queue, in the order in which a runner names them, plus its rank:
0 for priority 9, to 9 for priority 0. The twin of the SQL function `overdue`; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping

# Priorities 9 to 0 as ranks 0 to 9: in each queue a line for each.
RANKS = 10


def overdue(waited_seconds: Mapping[int, float], aging_seconds: float) -> list[int]:
    """The places whose heads go first, the most overdue in front. `waited_seconds` is how long each head has waited.

    A head may be made to wait `aging_seconds` for each level that the line which would be served next stands above it. In
    another queue of the same runner, which stands behind by its order alone, that is one level at least.
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
