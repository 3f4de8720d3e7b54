"""The health of each loop of this process: written by the loops, read by the health port from another thread.

One set per process, like the metrics, because a health port describes a process. Writing is a few assignments: it must
never wait, query the database, or fail a loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

# A tick takes milliseconds. Ten seconds is longer than any wait of a healthy one, and shorter than a missed heartbeat
# deadline.
STALLED_SECONDS = 10.0
MOST_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One loop at one moment."""

    name: str
    is_essential: bool
    is_ticking: bool
    failures: int
    is_unreachable: bool
    reason: str | None
    failing_since: datetime | None
    latest_success_at: datetime | None
    quiet_seconds: float
    is_stalled: bool
    blocked: str | None


class Pulse:
    """Written by one loop, read by others. A reader may see a half-recorded tick: the next read corrects it."""

    def __init__(self, name: str, *, longest_tick_seconds: float = STALLED_SECONDS, is_essential: bool = True) -> None:
        """A loop that is not essential is shown, but does not affect the service's readiness."""
        self.name, self.is_essential = name, is_essential
        self._longest_tick_seconds = longest_tick_seconds
        self._is_ticking = False
        self._failures = 0
        self._is_unreachable = False
        self._reason = ""
        self._failing_since = 0.0
        self._latest_success_at = 0.0
        self._moved = time.monotonic()
        self._quiet_until = self._moved + STALLED_SECONDS
        # Set by a loop whose ticks succeed but cannot do their work, with the reason for people.
        self.blocked: str | None = None

    def begin(self) -> None:
        """A tick begins, or a long one reports progress."""
        self._moved = time.monotonic()
        self._quiet_until = self._moved + self._longest_tick_seconds
        self._is_ticking = True

    def succeed(self, delay: float) -> None:
        """The tick ended, and the next one is due after `delay` seconds."""
        self._failures = 0
        self._latest_success_at = time.time()
        self._rest(delay)

    def fail(self, error: BaseException, *, is_unreachable: bool, delay: float) -> None:
        """`is_unreachable`: the database or the network did not answer, as opposed to an error in the tick."""
        if self._failures == 0:
            self._failing_since = time.time()
        self._reason, self._is_unreachable = _text(error), is_unreachable
        self._failures += 1
        self._rest(delay)

    def look(self) -> Seen:
        failures, now = self._failures, time.monotonic()
        is_failing = failures > 0
        return Seen(
            name=self.name,
            is_essential=self.is_essential,
            is_ticking=self._is_ticking,
            failures=failures,
            is_unreachable=is_failing and self._is_unreachable,
            reason=self._reason if is_failing else None,
            failing_since=_instant(self._failing_since) if is_failing else None,
            latest_success_at=_instant(self._latest_success_at) if self._latest_success_at else None,
            quiet_seconds=now - self._moved,
            is_stalled=now > self._quiet_until,
            blocked=self.blocked,
        )

    def _rest(self, delay: float) -> None:
        self._moved = time.monotonic()
        self._quiet_until = self._moved + max(delay, 0.0) + STALLED_SECONDS
        self._is_ticking = False


_PULSES: dict[str, Pulse] = {}


@contextmanager
def shown(pulse: Pulse) -> Iterator[Pulse]:
    """Within the block, `look_at_all` returns the loop, too."""
    _PULSES[pulse.name] = pulse
    try:
        yield pulse
    finally:
        if _PULSES.get(pulse.name) is pulse:
            del _PULSES[pulse.name]


def look_at_all() -> list[Seen]:
    # Copied in one step: loops of other threads come and go meanwhile.
    return [pulse.look() for pulse in list(_PULSES.values())]


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _text(error: BaseException) -> str:
    """Only the first line: the details below it may quote a row."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= MOST_REASON_CHARACTERS else text[: MOST_REASON_CHARACTERS - 3] + "..."
