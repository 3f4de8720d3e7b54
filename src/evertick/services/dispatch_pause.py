"""How long submission to an executor pauses when the executor is full or unreachable. No I/O."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

LONGEST_SECONDS = 60.0
_FIRST_SECONDS = 0.5


def back_off(failures: int, longest_seconds: float = LONGEST_SECONDS) -> float:
    """Seconds to wait after this many failures in a row, jittered so that callers do not return together."""
    return min(_FIRST_SECONDS * 2.0 ** min(failures - 1, 10), longest_seconds) * random.uniform(0.5, 1.0)


class Pause:
    """Grows with each failure, and ends with the first success. `now` is read from a monotonic clock."""

    def __init__(self, *, longest_seconds: float = LONGEST_SECONDS, now: Callable[[], float] = time.monotonic) -> None:
        self._longest_seconds, self._now = longest_seconds, now
        self._failures, self._until = 0, 0.0

    @property
    def seconds_left(self) -> float:
        return max(self._until - self._now(), 0.0)

    @property
    def is_over(self) -> bool:
        return self.seconds_left <= 0

    def note_success(self) -> None:
        self._failures, self._until = 0, 0.0

    def note_failure(self, at_least_seconds: float | None = None) -> float:
        """Returns how long all submissions wait now. Several failures at the same time count as one."""
        if self.is_over:
            self._failures += 1
            self._until = self._now() + back_off(self._failures, self._longest_seconds)
        if at_least_seconds is not None:
            self._until = max(self._until, self._now() + min(at_least_seconds, self._longest_seconds))
        return self.seconds_left
