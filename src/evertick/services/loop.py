"""The only loop. A service is a `tick` that does one bounded batch and returns the seconds to its next.

Waits for a wake-up or the delay, catches what a tick raises, backs off, measures. Must never wait for user code.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import psycopg

from evertick.domain.errors import PostgresUnavailable
from evertick.services.events import Log

LONGEST_BACK_OFF_SECONDS = 5.0
# What passes by itself: the database is away, or a connection broke.
UNREACHABLE = (psycopg.OperationalError, psycopg.InterfaceError, PostgresUnavailable)

T = TypeVar("T")


async def run_loop(
    tick: Callable[[], Awaitable[float]],
    *,
    wake: asyncio.Event,
    stop: asyncio.Event,
    name: str,
    log: Log,
    longest_back_off: float = LONGEST_BACK_OFF_SECONDS,
) -> None:
    """Tick until `stop` is set. A failing tick is logged, and tried again after a growing, jittered pause."""
    failures = 0
    while not stop.is_set():
        wake.clear()
        started = time.monotonic()
        try:
            delay = await tick()
            if failures:
                log.info("recovered", loop=name, after_failures=failures)
            failures = 0
        except (*UNREACHABLE, OSError) as error:
            failures += 1
            delay = min(back_off(failures), longest_back_off)
            log.warning("unreachable", loop=name, error=error, retry_in=delay)
        except Exception as error:
            failures += 1
            delay = min(back_off(failures), longest_back_off)
            log.error("tick_failed", loop=name, error=error, seconds=time.monotonic() - started, retry_in=delay)
        await _wait(wake, stop, delay)


async def keep_trying(work: Callable[[], Awaitable[T]], *, stop: asyncio.Event, name: str, log: Log) -> T:
    """What `work` gives once the database can be reached; for what a service cannot go on without. Raises at `stop`."""
    failures = 0
    while True:
        try:
            return await work()
        except UNREACHABLE as error:
            if stop.is_set():
                raise
            failures += 1
            delay = back_off(failures)
            log.warning("unreachable", loop=name, error=error, retry_in=delay)
        await _wait(stop, stop, delay)


def back_off(failures: int) -> float:
    """Seconds to wait after that many failures in a row, spread so that a fleet does not come back at once."""
    return float(min(0.1 * 2 ** min(failures, 10), LONGEST_BACK_OFF_SECONDS) * random.uniform(0.5, 1.0))


async def _wait(wake: asyncio.Event, stop: asyncio.Event, seconds: float) -> None:
    if stop.is_set() or wake.is_set() or seconds <= 0:
        await asyncio.sleep(0)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
