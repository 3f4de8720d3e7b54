"""The runner: a process that claims tasks and has them executed, in one session after the other.

A session that was declared dead ends, with everything that it held, and the next one begins: a host that froze and
resumes recovers by itself. Two sessions never overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from evertick.config import Settings
from evertick.domain.attempt import RunnerRequest
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runner.session import Session
from evertick.runner.state import Ending
from evertick.runtime.loop import back_off

# A session that lasted this long did not fail because of the runner itself: the next one begins at once.
STEADY_SECONDS = 60.0


class RunnerSession(Protocol):
    """One registration of a runner. `request` is the drain request that applies now."""

    @property
    def request(self) -> RunnerRequest | None: ...

    async def run(self) -> Ending: ...

    def stop(self) -> None: ...

    def stop_now(self) -> None: ...


# Creates the next session, with the drain request that still applies.
Begin = Callable[[RunnerRequest | None], RunnerSession]


class Runner:
    """Stops when `stop` and `wake` are set: running attempts may finish within the grace period, the rest is returned."""

    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        log: Log,
        environment: Mapping[str, str] | None = None,
        begin: Begin | None = None,
    ) -> None:
        """`environment` is the environment that tasks see; None passes on all of the runner's own. `begin` creates the
        sessions; by default, sessions that run tasks on this machine."""
        self._settings, self._url, self._log, self._environment = settings, url, log, environment
        self._begin = begin or self._begin_here
        self.wake, self.stop = asyncio.Event(), asyncio.Event()
        self._hurry = asyncio.Event()
        metrics.SLOTS.set(settings.runner_slots)

    def stop_now(self) -> None:
        """Stop without a grace period."""
        self.stop.set()
        self._hurry.set()
        self.wake.set()

    async def run(self) -> None:
        deaths = 0
        request: RunnerRequest | None = None
        while not self.stop.is_set():
            started = time.monotonic()
            session = self._begin(request)
            ending = await self._run_session(session)
            if ending is not Ending.DECLARED_DEAD:
                # It was drained with a request to exit, by `stop` or through the database.
                self.stop.set()
                return
            request = session.request
            deaths = 1 if time.monotonic() - started > STEADY_SECONDS else deaths + 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), 0 if deaths == 1 else back_off(deaths))

    def _begin_here(self, request: RunnerRequest | None) -> RunnerSession:
        return Session(self._settings, url=self._url, log=self._log, environment=self._environment, request=request)

    async def _run_session(self, session: RunnerSession) -> Ending:
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(self._pass_on_stop(session))
            ending = await session.run()
            stopping.cancel()
        return ending

    async def _pass_on_stop(self, session: RunnerSession) -> None:
        await self.stop.wait()
        session.stop()
        await self._hurry.wait()
        session.stop_now()
