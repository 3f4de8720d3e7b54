"""The signals that a task raises or returns to set its outcome. Any other exception is a failure, retried by its policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from evertick.domain.errors import UserError


class Skip(Exception):
    """End this task as skipped: `raise Skip("nothing new since yesterday")`."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Fail(Exception):
    """End this task as failed, by default without using the remaining retries: they would not help."""

    def __init__(self, reason: str = "", *, no_retry: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.no_retry = no_retry


class RetryAfter(Exception):
    """Fail this attempt and retry it after this delay instead of the policy's: `raise RetryAfter(30, "throttled")`."""

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        super().__init__(reason)
        given = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
            raise UserError(f"RetryAfter takes seconds or a timedelta, 0 or more, not {seconds!r:.100}.")
        self.seconds = float(given)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Done:
    """A sensor's return value once its condition is met: `return Done(rows)`. The value becomes the task's result."""

    value: object = None


@dataclass(frozen=True, slots=True)
class Until:
    """The result of an attempt that computed until when its task waits."""

    instant: datetime
