"""Which starts can have served which targets, told by time alone: the largest matching, in O(n log n).

Knows no ids, so that a database that lies about them cannot hide a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


def match(
    targets: Iterable[int], starts: Iterable[int], deadline_of: Callable[[int], int]
) -> tuple[list[int], list[int]]:
    """The targets that no start served, and the starts that served no target.

    A start at s may serve a target t if t <= s <= deadline_of(t). A later target never has an earlier deadline, so the
    oldest waiting target is always the most urgent one, and serving it first is best.
    """
    coming, waiting = deque(sorted(targets)), deque[tuple[int, int]]()
    missed, extra = [], []
    for start in sorted(starts):
        while coming and coming[0] <= start:
            target = coming.popleft()
            waiting.append((deadline_of(target), target))
        while waiting and waiting[0][0] < start:
            missed.append(waiting.popleft()[1])
        if waiting:
            waiting.popleft()
        else:
            extra.append(start)
    return sorted([*missed, *(target for _, target in waiting), *coming]), extra
