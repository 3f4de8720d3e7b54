"""One registration of a runner: its identity, its connections to the database, and how it ends.

The same for runners that execute tasks and for runners that submit them to a remote executor. Decides nothing about
tasks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel, notify
from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from evertick.domain.attempt import RunnerRequest, session_text
from evertick.domain.errors import PostgresUnavailable
from evertick.observability.logging import Log
from evertick.processes.identity import is_provably_gone, pid_started, this_process
from evertick.processes.linux import boot_seconds
from evertick.runner.state import Ending, RunnerState
from evertick.runtime.connections import Notifier, ReconnectingConnection
from evertick.runtime.loop import NOT_ALLOWED, UNREACHABLE, keep_trying
from evertick.runtime.server_watch import SELDOM_SECONDS

DEREGISTER_SECONDS = 5.0


def new_runner(session: int, settings: Settings, *, request: str | None = None) -> NewRunner:
    place, pid = this_process(), os.getpid()
    return NewRunner(
        session=session,
        runner_id=settings.runner_id or f"{place.host}-{pid}",
        name=settings.runner_name,
        version=version("evertick"),
        host=place.host,
        boot_id=place.boot_id,
        pid_namespace=place.pid_namespace,
        uid=place.uid,
        pid=pid,
        pid_started=pid_started(pid),
        queues=list(settings.runner_queues),
        match=list(settings.runner_task_patterns),
        slots=settings.runner_slots,
        request=request,
        lost_after_seconds=settings.lost_after_seconds,
        executor=settings.executor,
    )


class Registration:
    """`over` is set when the session must end, `hurry` when it must end without a grace period."""

    def __init__(
        self, settings: Settings, *, url: str, log: Log, request: RunnerRequest | None, wake: asyncio.Event
    ) -> None:
        """`request` is a drain request of the previous session that still applies; `wake` wakes the session's loop."""
        self.session = secrets.randbits(63)
        self.me = new_runner(self.session, settings, request=request)
        named = {"name": self.me.name} if self.me.name else {}
        self.log = log.bind(runner=self.me.runner_id, **named, session=session_text(self.session))
        self.state = RunnerState(
            slots=settings.runner_slots,
            lost_after_seconds=settings.lost_after_seconds,
            now=boot_seconds(),
            request=request,
        )
        self.hot, self.side = (
            ReconnectingConnection(url, Purpose.RUNNER),
            ReconnectingConnection(url, Purpose.SCHEDULER),
        )
        self.notifier = Notifier(url, is_enabled=settings.listen_notify, log=self.log, look_seconds=SELDOM_SECONDS)
        self.over, self.hurry = asyncio.Event(), asyncio.Event()
        self.ending = Ending.STOPPED
        self._wake, self._notifies = wake, settings.listen_notify

    def stop(self) -> None:
        self.over.set()
        self._wake.set()

    def stop_now(self) -> None:
        self.hurry.set()
        self.stop()

    async def register(self, check: Callable[[AsyncConnection], Awaitable[None]], **served: str) -> bool:
        """Register, then `check`. False if a stop was requested before: then there is nothing to do."""

        async def attempt() -> None:
            conn = await self.side.get()
            self.state.on_answer(boot_seconds())
            await self._register(conn)
            await check(conn)

        try:
            await keep_trying(attempt, stop=self.over, name="register", log=self.log)
        except (*UNREACHABLE, NOT_ALLOWED) as error:
            self.log.warning("deregister_failed", error=error)
            return False
        self.log.info("runner_started", slots=self.me.slots, queues=",".join(self.me.queues), **served, pid=self.me.pid)
        return True

    async def _register(self, conn: AsyncConnection) -> None:
        """Repeating a registration whose reply was lost is harmless. Two runners may have the same readable id; each
        logs a warning."""
        await runners.register(conn, self.me)
        if self._notifies:
            # Before the first claim, so that the other runners of the machine know the holder of every attempt.
            await notify(conn, Channel.RUNNER)
        place = this_process()
        for other in await runners.namesakes(conn, runner_id=self.me.runner_id, session=self.session):
            if not is_provably_gone(other, place):
                message = "Another live runner has this id. Their sessions distinguish them."
                self.log.warning(
                    "runner_id_duplicated", message=message, other=session_text(other.session), other_host=other.host
                )

    def on_declared_dead(self, attempts: int) -> None:
        """Another process declared this session dead: end it; its attempts no longer belong to it."""
        if self.ending is not Ending.DECLARED_DEAD:
            self.ending = Ending.DECLARED_DEAD
            self.log.error("session_declared_dead", attempts=attempts)
            self.stop()

    def on_request(self) -> None:
        """An operator requested a drain, or withdrew that."""
        if self.state.request is None:
            self.log.info("drain_canceled")
        else:
            self.log.info("drain_requested", is_leaving=self.state.request is RunnerRequest.LEAVE)

    def on_idle(self) -> None:
        """The runner is idle: exit if a drain requested that."""
        if self.state.report_drained():
            self.log.info("runner_drained")
        if self.state.request is RunnerRequest.LEAVE and not self.over.is_set():
            self.ending = Ending.DRAINED
            self.log.info("runner_exited")
            self.stop()

    async def deregister(self, last: Callable[[], Awaitable[None]], **left: Callable[[], int]) -> None:
        """Deregister once `last` is done, with a short timeout: if the database does not answer, exit without. `left`
        is read then."""
        try:
            async with asyncio.timeout(DEREGISTER_SECONDS):
                await last()
                await runners.leave(await self.side.get(), self.session)
        except (TimeoutError, psycopg.Error, PostgresUnavailable, OSError) as error:
            self.log.warning("deregister_failed", error=error, **{name: count() for name, count in left.items()})
        self.log.info("service_stopped", reason=self.ending.value)

    async def close(self) -> None:
        for link in (self.hot, self.side):
            await link.close()
        await self.notifier.close()
