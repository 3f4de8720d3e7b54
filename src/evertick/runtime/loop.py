"""The loop of every service. A service is a `tick` that does one bounded batch and returns the seconds to its next.

Waits for a notification or the delay, catches errors of a tick, backs off, measures. Must never wait for user code.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from psycopg import InterfaceError, OperationalError, errors

from evertick.domain.errors import ApiUnreachable, PostgresUnavailable
from evertick.observability import metrics
from evertick.observability.health import LoopHealth, track
from evertick.observability.logging import Log

LONGEST_BACK_OFF_SECONDS = 5.0
# Errors that pass by themselves: the database is down, full, out of connections or read-only for now, or a connection
# broke.
UNREACHABLE = (OperationalError, InterfaceError, errors.ReadOnlySqlTransaction, PostgresUnavailable, ApiUnreachable)
# The login lacks its service's permissions: once an operator grants them, the service continues by itself.
NOT_ALLOWED = errors.InsufficientPrivilege
_GIVE_RIGHTS = "This login lacks a permission: grant it the role of its service, see `evertick db roles`."

T = TypeVar("T")


async def run_loop(
    tick: Callable[[], Awaitable[float]],
    *,
    name: str,
    log: Log,
    wake: asyncio.Event | None = None,
    stop: asyncio.Event | None = None,
    is_essential: bool = True,
    pulse: LoopHealth | None = None,
) -> None:
    """Tick until `stop` is set, or until canceled. A failing tick is logged, and retried after a growing, jittered pause.

    `wake` ends the pause. Others do not depend on a loop that is not essential. `pulse` records the loop's health, for one
    whose ticks may take long.
    """
    wake, stop, failures = wake or asyncio.Event(), stop or asyncio.Event(), 0
    seconds_of_ticks = metrics.TICK_SECONDS.labels(service=name)
    with track(pulse or LoopHealth(name, is_essential=is_essential)) as pulse:
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
                delay = back_off(failures)
                metrics.JOB_FAILURES.labels(job=name).inc()
                _report_failure(error, pulse, delay, seconds=time.monotonic() - started, log=log)
            seconds_of_ticks.observe(time.monotonic() - started)
            await _wait(wake, stop, delay)


async def keep_trying(work: Callable[[], Awaitable[T]], *, stop: asyncio.Event, name: str, log: Log) -> T:
    """The result of `work` once the database is reachable and grants access; for work that a service cannot start
    without. Raises at `stop`."""
    failures = 0
    with track(LoopHealth(name)) as pulse:
        while True:
            pulse.begin()
            started = time.monotonic()
            try:
                return await work()
            except (*UNREACHABLE, NOT_ALLOWED) as error:
                if stop.is_set():
                    raise
                failures += 1
                delay = back_off(failures)
                _report_failure(error, pulse, delay, seconds=time.monotonic() - started, log=log)
            await _wait(stop, stop, delay)


@asynccontextmanager
async def in_background(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run this work concurrently with the block, and cancel it at the end of the block. If one fails, so does the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()


def _report_failure(error: Exception, pulse: LoopHealth, delay: float, *, seconds: float, log: Log) -> None:
    # A full disk is an OSError, too, and says nothing about the database.
    is_unreachable = isinstance(error, (*UNREACHABLE, ConnectionError, TimeoutError))
    pulse.fail(error, is_unreachable=is_unreachable, delay=delay)
    if isinstance(error, (*UNREACHABLE, OSError)):
        log.warning("database_unreachable", loop=pulse.name, error=error, retry_in=delay)
    elif isinstance(error, NOT_ALLOWED):
        log.error("permission_denied", message=_GIVE_RIGHTS, loop=pulse.name, error=error, retry_in=delay)
    else:
        log.error("loop_failed", loop=pulse.name, error=error, seconds=seconds, retry_in=delay)


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
