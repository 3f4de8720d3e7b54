"""A worker pool for slow work on attempts, apart from the loop that decides: bounded workers, a bounded queue, one job
per attempt. And how long submission pauses when the executor is full or unreachable.

In memory only: after a crash the next read of the work list recreates the jobs (A16). Never drops a job silently.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.loop import UNREACHABLE

Work = Callable[[], Awaitable[None]]
LONGEST_BACK_OFF_SECONDS = 60.0
_FIRST_BACK_OFF_SECONDS = 0.5


class WorkerPool:
    """`name` is logged when a job fails; `wake` is set after each job."""

    def __init__(self, *, name: str, workers: int, queue: int, wake: asyncio.Event, log: Log) -> None:
        self._name, self._workers, self._most = name, workers, workers + queue
        self._wake, self._log = wake, log
        self._queue: asyncio.Queue[tuple[int, Work]] = asyncio.Queue()
        self._jobs: set[int] = set()
        self._started: set[int] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def room(self) -> int:
        """The number of jobs it can still accept."""
        return self._most - len(self._jobs)

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def has(self, session: int) -> bool:
        return session in self._jobs

    def is_busy_with(self, session: int) -> bool:
        """Whether this attempt's job has started."""
        return session in self._started

    def enqueue(self, session: int, work: Work) -> bool:
        """Returns whether the job was accepted: not if the attempt already has one, or if the queue is full."""
        if session in self._jobs or self.room <= 0:
            return False
        self._jobs.add(session)
        self._is_idle.clear()
        self._queue.put_nowait((session, work))
        return True

    def forget_waiting(self) -> None:
        """Drop all queued jobs."""
        while not self._queue.empty():
            self._end(self._queue.get_nowait()[0])

    async def wait_until_idle(self) -> None:
        await self._is_idle.wait()

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            session, work = await self._queue.get()
            self._started.add(session)
            try:
                await work()
            except (*UNREACHABLE, OSError) as error:
                self._log.warning("database_unreachable", loop=self._name, error=error)
            except Exception as error:
                # Whatever the error, it concerns this attempt alone, and the next read of the work list retries it
                # (V11).
                metrics.JOB_FAILURES.labels(job=self._name).inc()
                self._log.error("loop_failed", loop=self._name, error=error)
            finally:
                self._end(session)

    def _end(self, session: int) -> None:
        self._jobs.discard(session)
        self._started.discard(session)
        if not self._jobs:
            self._is_idle.set()
        self._wake.set()


def back_off(failures: int, longest_seconds: float = LONGEST_BACK_OFF_SECONDS) -> float:
    """Seconds to wait after this many failures in a row, jittered so that callers do not return together."""
    return min(_FIRST_BACK_OFF_SECONDS * 2.0 ** min(failures - 1, 10), longest_seconds) * random.uniform(0.5, 1.0)


class SubmissionBackoff:
    """A pause of all submissions: it grows with each failure, and ends with the first success. `now` reads a monotonic
    clock."""

    def __init__(
        self, *, longest_seconds: float = LONGEST_BACK_OFF_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
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
