"""Work for attempts that may take long, beside the loop that decides: so many at once, so many in line, one piece per attempt.

In memory only: a crash forfeits it, and the next look at the work list makes it anew (A16). Never drops a piece silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from evertick.services import metrics
from evertick.services.events import Log
from evertick.services.loop import UNREACHABLE

Work = Callable[[], Awaitable[None]]


class Pool:
    """`name` is told where a piece of work fails; `on_done` is called after each."""

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
        """How many more it takes."""
        return self._most - len(self._known)

    @property
    def waiting(self) -> int:
        return self._line.qsize()

    def has(self, session: int) -> bool:
        return session in self._known

    def is_busy_with(self, session: int) -> bool:
        """Whether its piece has been begun."""
        return session in self._begun

    def offer(self, session: int, work: Work) -> bool:
        """Whether it was taken: not if something is in hand for this attempt already, nor if there is no room."""
        if session in self._known or self.room <= 0:
            return False
        self._known.add(session)
        self._is_idle.clear()
        self._line.put_nowait((session, work))
        return True

    def forget_waiting(self) -> None:
        """Nothing of what waits in line is begun any more."""
        while not self._line.empty():
            self._end(self._line.get_nowait()[0])

    async def wait_until_idle(self) -> None:
        await self._is_idle.wait()

    async def run(self) -> None:
        """Until canceled."""
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
                # Whatever it is, it concerns this attempt alone, and is tried again with the next look (V11).
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
