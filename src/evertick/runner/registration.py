"""One registration of a runner: its identity, its connections to the database, its heartbeat, and how it ends.

The same for runners that execute tasks and for runners that submit them to a remote executor. Decides nothing about
tasks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

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
from evertick.processes.identity import is_provably_gone, process_name, registered_place, this_process
from evertick.processes.system import boot_seconds
from evertick.runner.events import EventQueue, NotificationArrived
from evertick.runner.exchange import Claims
from evertick.runner.heartbeat import Heartbeat
from evertick.runner.housekeeping import clean_results
from evertick.runner.peer_check import PeerCheck
from evertick.runner.state import Ending, RunnerState
from evertick.runtime.connections import Notifier, ReconnectingConnection, listen_forever
from evertick.runtime.loop import NOT_ALLOWED, UNREACHABLE, keep_trying, run_loop
from evertick.runtime.server_watch import SELDOM_SECONDS

DEREGISTER_SECONDS = 5.0

Work = Coroutine[None, None, None]


def new_runner(session: int, settings: Settings, *, request: str | None = None) -> NewRunner:
    return NewRunner(
        session=session,
        runner_id=settings.runner_id or process_name(),
        name=settings.runner_name,
        version=version("evertick"),
        **registered_place(),
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
        self, settings: Settings, *, url: str, log: Log, request: RunnerRequest | None, events: EventQueue[Any]
    ) -> None:
        """`request` is a drain request of the previous session that still applies; `events` are the session's."""
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
        self.hot = ReconnectingConnection(url, Purpose.RUNNER)
        self.side = ReconnectingConnection(url, Purpose.SCHEDULER)
        self.notifier = Notifier(url, is_enabled=settings.listen_notify, log=self.log, look_seconds=SELDOM_SECONDS)
        self.over, self.hurry = asyncio.Event(), asyncio.Event()
        self.ending = Ending.STOPPED
        self.claims = Claims(settings, session=self.session, log=self.log)
        # A runner with a remote executor holds no attempts: they have their own leases, which their agents extend.
        self.heartbeat = Heartbeat(
            settings, url=url, session=self.session, held=self.state.held, put=events.put, log=self.log
        )
        self._peers = PeerCheck(settings, link=self.side, put=events.put, log=self.log)
        self._settings, self._url, self._events = settings, url, events

    async def serve(
        self,
        tick: Callable[[], Awaitable[float]],
        *,
        executor: AbstractAsyncContextManager[object],
        group: asyncio.TaskGroup,
        works: Callable[[], list[Work]],
        leave: Callable[[], Awaitable[None]],
    ) -> None:
        """Run `tick` until the session is over, then `leave`. `works` and those of every runner run meanwhile in
        `group`, until they are canceled."""
        self.heartbeat.start()
        async with executor, group:
            background = [group.create_task(work) for work in (*works(), *self._works())]
            await run_loop(tick, wake=self._events.wake, stop=self.over, name="runner", log=self.log)
            await leave()
            for task in background:
                task.cancel()
        self.heartbeat.stop()
        for link in (self.hot, self.side):
            await link.close()
        await self.notifier.close()

    def _works(self) -> list[Work]:
        works = [self._peers.run(), clean_results(self._settings, link=self.side, log=self.log), self.notifier.run()]
        if self._settings.listen_notify:
            channels = [Channel.TASKS, Channel.STOP, Channel.RUNNER]
            works.append(listen_forever(self._url, channels, self._on_notification, log=self.log))
        return works

    def _on_notification(self, channel: Channel) -> None:
        if channel is Channel.STOP:
            self.heartbeat.beat_now()
        elif channel is Channel.RUNNER:
            self._peers.list_soon()
        self._events.put(NotificationArrived(channel))

    def stop(self) -> None:
        """End the session: what runs may finish within the grace period, the rest is returned."""
        self.over.set()
        self._events.wake.set()

    def stop_now(self) -> None:
        """End the session without a grace period."""
        self.hurry.set()
        self.stop()

    async def register(self, **served: str) -> bool:
        """False if a stop was requested before: then there is nothing to do."""

        async def attempt() -> None:
            conn = await self.side.get()
            self.state.on_answer(boot_seconds())
            await self._register(conn)
            await self.claims.check_patterns(conn)

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
        if self._settings.listen_notify:
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
