"""The only place in the tests that waits: polls for a condition, with a deadline and a message."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# For what takes milliseconds: so long only where a machine stands still.
WITHIN_SECONDS = 30.0
_PAUSE_SECONDS = 0.005
# A question costs a millisecond of somebody's time: whoever has waited for a fifth of a second asks no more often than this.
_PATIENT_SECONDS = 0.02


async def eventually(
    predicate: Callable[[], Any], within_seconds: float = WITHIN_SECONDS, *, pause_seconds: float = _PAUSE_SECONDS
) -> Any:
    """Poll until `predicate`, sync or async, gives something true, and return that; fail after the deadline."""
    deadline = time.monotonic() + within_seconds
    for pause in _pauses(pause_seconds):
        outcome = predicate()
        value = await outcome if inspect.isawaitable(outcome) else outcome
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_seconds:g} s: {_text(predicate)}; last: {value!r}"
        await asyncio.sleep(pause)


def eventually_sync(
    predicate: Callable[[], T], within_seconds: float = WITHIN_SECONDS, *, pause_seconds: float = _PAUSE_SECONDS
) -> T:
    """The same, for tests without an event loop."""
    deadline = time.monotonic() + within_seconds
    for pause in _pauses(pause_seconds):
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_seconds:g} s: {_text(predicate)}; last: {value!r}"
        time.sleep(pause)
    raise AssertionError("there is always another pause")


async def elapse(seconds: float) -> None:
    """Let time pass, where the time itself is what is tested: how long a fault lasts. Never to wait for something."""
    await asyncio.sleep(seconds)


def _pauses(first: float) -> Iterator[float]:
    pause = first
    while True:
        yield pause
        pause = max(first, min(1.1 * pause, _PATIENT_SECONDS))


def _text(predicate: Callable[[], object]) -> str:
    try:
        return inspect.getsource(predicate).strip()
    except (OSError, TypeError):
        return repr(predicate)
