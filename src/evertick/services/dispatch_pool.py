"""A worker pool for slow work on attempts, apart from the loop that decides: bounded workers, a bounded queue, one job
per attempt.

In memory only: after a crash the next read of the work list recreates the jobs (A16). Never drops a job silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from evertick.services import metrics
from evertick.services.events import Log
from evertick.services.loop import UNREACHABLE

Work = Callable[[], Awaitable[None]]


class Pool:
    """`name` is logged when a job fails; `on_done` is called after each job."""

    def __init__(self, *, name: str, workers: int, queue: int, on_done: Callable[[], None], log: Log) -> None:
        self._name, self._workers, self._most = name, workers, workers + queue
        self._on_done, self._log = on_done, log
        self._line: asyncio.Queue[tuple[int, Work]] = asyncio.Queue()
        self._known: set[int] = set()
        self._begun: set[int] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def room(self) -> int:
        """The number of jobs it can still accept."""
        return self._most - len(self._known)

    @property
    def waiting(self) -> int:
        return self._line.qsize()

    def has(self, session: int) -> bool:
        return session in self._known

    def is_busy_with(self, session: int) -> bool:
        """Whether this attempt's job has started."""
        return session in self._begun

    def offer(self, session: int, work: Work) -> bool:
        """Returns whether the job was accepted: not if the attempt already has one, or if the queue is full."""
        if session in self._known or self.room <= 0:
            return False
        self._known.add(session)
        self._is_idle.clear()
        self._line.put_nowait((session, work))
        return True

    def forget_waiting(self) -> None:
        """Drop all queued jobs."""
        while not self._line.empty():
            self._end(self._line.get_nowait()[0])

    async def wait_until_idle(self) -> None:
        await self._is_idle.wait()

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            session, work = await self._line.get()
            self._begun.add(session)
            try:
                await work()
            except (*UNREACHABLE, OSError) as error:
                self._log.warning("unreachable", loop=self._name, error=error)
            except Exception as error:
                # Whatever the error, it concerns this attempt alone, and the next read of the work list retries it
                # (V11).
                metrics.STEP_FAILURES.labels(step=self._name).inc()
                self._log.error("tick_failed", loop=self._name, error=error)
            finally:
                self._end(session)

    def _end(self, session: int) -> None:
        self._known.discard(session)
        self._begun.discard(session)
        if not self._known:
            self._is_idle.set()
        self._on_done()
