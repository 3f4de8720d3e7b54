"""The loop of every service. A service is a `tick` that does one bounded batch and returns the seconds to its next.

Waits for a notification or the delay, catches errors of a tick, backs off, measures. Must never wait for user code.
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
from evertick.observability import metrics
from evertick.observability.health import LoopHealth, track
from evertick.observability.logging import Log

LONGEST_BACK_OFF_SECONDS = 5.0
# Errors that pass by themselves: the database is down, full, out of connections or read-only for now, or a connection
# broke.
UNREACHABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    PostgresUnavailable,
)
# The login lacks its service's permissions: once an operator grants them, the service continues by itself.
NOT_ALLOWED = psycopg.errors.InsufficientPrivilege
_GIVE_RIGHTS = "This login lacks a permission: grant it the role of its service, see `evertick db roles`."

T = TypeVar("T")


async def run_loop(
    tick: Callable[[], Awaitable[float]],
    *,
    wake: asyncio.Event,
    stop: asyncio.Event,
    name: str,
    log: Log,
    longest_back_off: float = LONGEST_BACK_OFF_SECONDS,
    pulse: LoopHealth | None = None,
) -> None:
    """Tick until `stop` is set. A failing tick is logged, and retried after a growing, jittered pause.

    `pulse` records the loop's health, for a loop whose ticks may take long or that others do not depend on.
    """
    failures = 0
    seconds_of_ticks = metrics.TICK_SECONDS.labels(service=name)
    with track(pulse or LoopHealth(name)) as pulse:
        while not stop.is_set():
            wake.clear()
            started = time.monotonic()
            pulse.begin()
            try:
                delay = await tick()
                if failures:
                    log.info("loop_recovered", loop=name, after_failures=failures)
                failures = 0
                pulse.succeed(delay)
            except Exception as error:
                failures += 1
                delay = back_off(failures, longest_back_off)
                metrics.JOB_FAILURES.labels(job=name).inc()
                # A full disk is an OSError, too, and says nothing about the database.
                is_unreachable = isinstance(error, (*UNREACHABLE, ConnectionError, TimeoutError))
                pulse.fail(error, is_unreachable=is_unreachable, delay=delay)
                if isinstance(error, (*UNREACHABLE, OSError)):
                    log.warning("database_unreachable", loop=name, error=error, retry_in=delay)
                elif isinstance(error, NOT_ALLOWED):
                    log.error("permission_denied", message=_GIVE_RIGHTS, loop=name, error=error, retry_in=delay)
                else:
                    took = time.monotonic() - started
                    log.error("loop_failed", loop=name, error=error, seconds=took, retry_in=delay)
            seconds_of_ticks.observe(time.monotonic() - started)
            await _wait(wake, stop, delay)


async def keep_trying(work: Callable[[], Awaitable[T]], *, stop: asyncio.Event, name: str, log: Log) -> T:
    """The result of `work` once the database is reachable and grants access; for work that a service cannot start
    without. Raises at `stop`."""
    failures = 0
    with track(LoopHealth(name)) as pulse:
        while True:
            pulse.begin()
            try:
                return await work()
            except (*UNREACHABLE, NOT_ALLOWED) as error:
                if stop.is_set():
                    raise
                failures += 1
                delay = back_off(failures)
                is_unreachable = not isinstance(error, NOT_ALLOWED)
                pulse.fail(error, is_unreachable=is_unreachable, delay=delay)
                if is_unreachable:
                    log.warning("database_unreachable", loop=name, error=error, retry_in=delay)
                else:
                    log.error("permission_denied", message=_GIVE_RIGHTS, loop=name, error=error, retry_in=delay)
            await _wait(stop, stop, delay)


def back_off(failures: int, longest_seconds: float = LONGEST_BACK_OFF_SECONDS) -> float:
    """Seconds to wait after this many failures in a row, jittered so that many processes do not return at once."""
    longest = min(longest_seconds, *_longest)
    return float(min(0.1 * 2 ** min(failures, 10), longest) * random.uniform(0.5, 1.0))


# Per process, so that it applies to every loop.
_longest = [LONGEST_BACK_OFF_SECONDS]


def limit_backoff(heartbeat_seconds: float) -> None:
    """Limit the back-off of every loop in this process to half a heartbeat, so that work resumes soon after an outage."""
    _longest[:] = [min(heartbeat_seconds / 2, LONGEST_BACK_OFF_SECONDS)]


async def _wait(wake: asyncio.Event, stop: asyncio.Event, seconds: float) -> None:
    if stop.is_set() or wake.is_set() or seconds <= 0:
        await asyncio.sleep(0)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await wake.wait()
