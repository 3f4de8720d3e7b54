"""Intervals of time during which something was broken, and until when a delay is excused by them. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

SECOND = 1_000_000_000

Interval = tuple[int, int]


class Windows:
    """Disjoint intervals in order; those that touch are one."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        merged: list[list[int]] = []
        for start, stop in sorted(intervals):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        self._starts = [start for start, _ in merged]
        self._stops = [stop for _, stop in merged]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Interval]:
        return iter(zip(self._starts, self._stops, strict=True))

    def deadline(self, start: int, allowed: int) -> int:
        """Until when something that began at `start` may last: `allowed`, and again after each window that it met."""
        end = start + allowed
        place = max(bisect_right(self._starts, start) - 1, 0)
        while place < len(self._starts) and self._starts[place] <= end:
            if self._stops[place] >= start:
                end = max(end, self._stops[place] + allowed)
            place += 1
        return end

    def meets(self, start: int, stop: int) -> bool:
        """Whether a window and this interval have an instant in common."""
        place = bisect_right(self._starts, stop) - 1
        return place >= 0 and self._stops[place] >= start

    def covered(self, start: int, stop: int) -> int:
        """How much of the interval lies in windows."""
        total = 0
        place = max(bisect_right(self._starts, start) - 1, 0)
        while place < len(self._starts) and self._starts[place] < stop:
            total += max(0, min(stop, self._stops[place]) - max(start, self._starts[place]))
            place += 1
        return total
