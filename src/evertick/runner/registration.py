"""Registers a runner's session in the list of live runners."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from enum import StrEnum
from importlib.metadata import version

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel, notify
from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from evertick.domain.attempt import session_text
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.runners import RunnerRequest
from evertick.executors.local.executor import LocalExecutor
from evertick.observability.logging import Log
from evertick.processes.identity import is_provably_gone, pid_started, this_process
from evertick.processes.linux import boot_seconds
from evertick.runner.state import DatabaseLiveness, DrainState
from evertick.runtime.connections import Notifier, ReconnectingConnection
from evertick.runtime.loop import NOT_ALLOWED, UNREACHABLE, keep_trying
from evertick.runtime.server_watch import SELDOM_SECONDS


async def join(conn: AsyncConnection, me: NewRunner, *, tells: bool, log: Log) -> None:
    """Repeating a registration whose reply was lost is harmless. Two runners may have the same readable id; each logs a
    warning.

    `tells`: notify other runners of the machine before the first claim, so that the holder of every attempt is known.
    """
    await runners.register(conn, me)
    if tells:
        await notify(conn, Channel.JOIN)
    place = this_process()
    for other in await runners.namesakes(conn, runner_id=me.runner_id, session=me.session):
        if not is_provably_gone(other, place):
            message = "Another live runner has this id. Their sessions distinguish them."
            log.warning("same_id", message=message, other=session_text(other.session), other_host=other.host)


class Ending(StrEnum):
    """Why a session ended."""

    STOPPED = "stopped"
    DISMISSED = "dismissed"
    BURIED = "buried"


async def stop_within(executor: LocalExecutor, grace_seconds: float, hurry: asyncio.Event) -> None:
    """Let attempts finish for the grace period, unless `hurry` is set; return the rest to the queue."""
    async with asyncio.TaskGroup() as group:
        in_peace = group.create_task(executor.stop(grace_seconds))
        hurried = group.create_task(hurry.wait())
        await asyncio.wait((in_peace, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not in_peace.done():
            await executor.stop(0.0)
        await in_peace
        hurried.cancel()


GOODBYE_SECONDS = 5.0


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
        match=list(settings.runner_match),
        slots=settings.runner_slots,
        request=request,
        lost_after_seconds=settings.lost_after_seconds,
        executor=settings.executor,
    )


class Registration:
    """`over` is set when the session must end, `hurry` when it must end without a grace period; `wake` wakes the
    session's loop."""

    def __init__(self, settings: Settings, *, url: str, log: Log, request: RunnerRequest | None) -> None:
        """`request` is a drain request of the previous session that still applies."""
        self.session = secrets.randbits(63)
        self.me = new_runner(self.session, settings, request=request)
        named = {"name": self.me.name} if self.me.name else {}
        self.log = log.bind(runner=self.me.runner_id, **named, session=session_text(self.session))
        self.duty = DrainState(request, log=self.log)
        self.hot, self.side = ReconnectingConnection(url, Purpose.HOT), ReconnectingConnection(url, Purpose.PLANNING)
        self.waker = Notifier(url, is_enabled=settings.notify, log=self.log, look_seconds=SELDOM_SECONDS)
        self.contact = DatabaseLiveness(settings.lost_after_seconds, now=boot_seconds())
        self.wake, self.over, self.hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ending, self.is_leaving = Ending.STOPPED, False
        self._tells = settings.notify

    def leave(self) -> None:
        self.over.set()
        self.wake.set()

    def leave_at_once(self) -> None:
        self.hurry.set()
        self.leave()

    async def begin(
        self, heard: Callable[[float], object], look: Callable[[AsyncConnection], Awaitable[None]], **served: str
    ) -> bool:
        """Register, then call `look`; `heard` receives the time at which the database answered. False if a stop was
        requested before: then there is nothing to do."""

        async def register() -> None:
            conn = await self.side.get()
            heard(boot_seconds())
            await join(conn, self.me, tells=self._tells, log=self.log)
            await look(conn)

        try:
            await keep_trying(register, stop=self.over, name="register", log=self.log)
        except (*UNREACHABLE, NOT_ALLOWED) as error:
            self.log.warning("left_without_goodbye", error=error)
            return False
        self.log.info("started", slots=self.me.slots, queues=",".join(self.me.queues), **served, pid=self.me.pid)
        return True

    def note_burial(self, attempts: int) -> None:
        """Another process declared this session dead: end it; its attempts no longer belong to it."""
        if self.ending is not Ending.BURIED:
            self.ending = Ending.BURIED
            self.log.error("buried", attempts=attempts)
            self.leave()

    def note_idle(self) -> None:
        """It is idle: exit if a drain requested that."""
        if self.duty.note_idle() and not self.over.is_set():
            self.ending = Ending.DISMISSED
            self.log.info("dismissed")
            self.leave()

    async def say_goodbye(self, last: Callable[[], Awaitable[None]], **left: Callable[[], int]) -> None:
        """Deregister once `last` is done, with a short timeout: if the database does not answer, exit without. `left`
        is called then."""
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await last()
                await runners.leave(await self.side.get(), self.session)
        except (TimeoutError, psycopg.Error, PostgresUnavailable, OSError) as error:
            self.log.warning("left_without_goodbye", error=error, **{name: count() for name, count in left.items()})
        self.log.info("stopped", reason=self.ending.value)

    async def close(self) -> None:
        for link in (self.hot, self.side):
            await link.close()
        await self.waker.close()
