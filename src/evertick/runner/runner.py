"""The runner: a process that claims tasks and has them executed, in one session after the other.

A session that was declared dead ends, with everything that it held, and the next one begins: a host that froze and
resumes recovers by itself. Two sessions never overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Protocol

from evertick.config import Settings
from evertick.domain.attempt import RunnerRequest
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runner.registration import Registration
from evertick.runner.session import LocalSession
from evertick.runner.state import Ending
from evertick.runtime.loop import back_off

# A session that lasted this long did not fail because of the runner itself: the next one begins at once.
STEADY_SECONDS = 60.0
# A runner that leaves when it is idle waits so long to be admitted.
JOIN_SECONDS = 300.0
# Bounds of the pause between two looks at whether it is time to leave.
SHORTEST_WATCH_SECONDS, LONGEST_WATCH_SECONDS = 0.05, 3600.0


class RunnerSession(Protocol):
    """One registration of a runner, which is also how it is stopped."""

    @property
    def registration(self) -> Registration: ...

    async def run(self) -> Ending: ...


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
        self._begin: Begin = begin or (
            lambda request: LocalSession(settings, url=url, log=log, environment=environment, request=request)
        )
        self.wake, self.stop = asyncio.Event(), asyncio.Event()
        self._hurry = asyncio.Event()
        self._idle_seconds = settings.runner_idle_seconds or inf
        self._leave_at = boot_seconds() + (settings.runner_until_seconds or inf)
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
            if ending is Ending.REFUSED:
                return
            if ending is not Ending.DECLARED_DEAD:
                # It was drained with a request to exit, by `stop` or through the database.
                self.stop.set()
                return
            request = session.registration.state.request
            deaths = 1 if time.monotonic() - started > STEADY_SECONDS else deaths + 1
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if deaths == 1 else back_off(deaths)):
                    await self.stop.wait()

    async def _run_session(self, session: RunnerSession) -> Ending:
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(each) for each in (self._pass_on_stop(session), self._leave_in_time(session))]
            ending = await session.run()
            for watch in watches:
                watch.cancel()
        return ending

    async def _leave_in_time(self, session: RunnerSession) -> None:
        """Of a runner that leaves by itself: when its time is over, or when it has been idle for long enough."""
        registration = session.registration
        while True:
            now, idle_seconds = boot_seconds(), registration.idle_seconds()
            if now >= self._leave_at:
                return registration.leave("its time is over")
            # A busy API must not make a runner leave that it has not admitted yet.
            longest_idle = self._idle_seconds if registration.is_registered else max(self._idle_seconds, JOIN_SECONDS)
            if idle_seconds >= longest_idle:
                return registration.leave(f"idle for {idle_seconds:.0f} s")
            pauses = (self._leave_at - now, longest_idle - idle_seconds, self._idle_seconds, LONGEST_WATCH_SECONDS)
            await asyncio.sleep(max(min(pauses), SHORTEST_WATCH_SECONDS))

    async def _pass_on_stop(self, session: RunnerSession) -> None:
        await self.stop.wait()
        session.registration.stop()
        await self._hurry.wait()
        session.registration.stop_now()
