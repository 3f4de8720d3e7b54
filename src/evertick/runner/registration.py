"""One registration of a runner: its identity, its access to the engine, its heartbeat, and how it ends.

The same for runners that execute tasks and for runners that submit them to a remote executor. Decides nothing about
tasks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Any

import psycopg

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries.runners import NewRunner
from evertick.domain.attempt import RunnerRequest, session_text
from evertick.domain.errors import EvertickError, Unauthenticated, UserError
from evertick.observability.logging import Log
from evertick.processes.identity import is_provably_gone, process_name, registered_place, this_process
from evertick.processes.system import boot_seconds
from evertick.runner.access import EngineAccess, Work
from evertick.runner.events import EventQueue, NotificationArrived
from evertick.runner.heartbeat import Heartbeat
from evertick.runner.housekeeping import clean_results
from evertick.runner.peer_check import PeerCheck
from evertick.runner.state import Ending, RunnerState
from evertick.runtime.loop import NOT_ALLOWED, UNREACHABLE, keep_trying, run_loop

DEREGISTER_SECONDS = 5.0


def draw_runner(settings: Settings, *, request: RunnerRequest | None = None) -> NewRunner:
    """A session of its own. `request` is a drain request of the previous one that still applies."""
    return new_runner(secrets.randbits(63), settings, request=request)


def named_log(log: Log, me: NewRunner) -> Log:
    """The session's log: each line names the runner."""
    named = {"name": me.name} if me.name else {}
    return log.bind(runner=me.runner_id, **named, session=session_text(me.session))


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
        self, settings: Settings, *, access: EngineAccess, me: NewRunner, log: Log, events: EventQueue[Any]
    ) -> None:
        """`events` are the session's."""
        self.access, self.me, self.session, self.log = access, me, me.session, log
        request = None if me.request is None else RunnerRequest(me.request)
        self.state = RunnerState(
            slots=settings.runner_slots,
            lost_after_seconds=settings.lost_after_seconds,
            now=boot_seconds(),
            request=request,
        )
        self.over, self.hurry = asyncio.Event(), asyncio.Event()
        self.ending = Ending.STOPPED
        # Whether it has work that is no attempt of its own: triggers, or attempts elsewhere.
        self.has_other_work: Callable[[], bool] = lambda: False
        # A runner with a remote executor holds no attempts: they have their own leases, which their agents extend.
        self.heartbeat = Heartbeat(
            settings, open_line=access.open_heartbeat, held=self.state.held, put=events.put, log=self.log
        )
        self._peers = PeerCheck(settings, peers=access, put=events.put, log=self.log)
        self._settings, self._events = settings, events
        self.is_registered = False

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
        await self.access.close()

    def _works(self) -> list[Work]:
        cleaning = clean_results(self._settings, existing=self.access.existing_runs, log=self.log)
        return [self._peers.run(), cleaning, *self.access.works(self._on_notification, self._load)]

    def _load(self) -> tuple[int, RunnerRequest | None]:
        takes_work = self.state.request is None and not self.state.is_stopping
        return self.state.free if takes_work else 0, self.state.asked

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

    def idle_seconds(self) -> float:
        return 0.0 if self.has_other_work() else self.state.idle_seconds(boot_seconds())

    def leave(self, why: str) -> None:
        """Take no new work, and end with the last attempt."""
        self.state.leave()
        self.log.info("leave_decided", reason=why)
        if self.is_registered:
            self._events.put(NotificationArrived(Channel.TASKS))
        else:
            # It never had a heartbeat, and has nothing to return.
            self.ending = Ending.DRAINED
            self.stop()

    async def register(self, **served: str) -> bool:
        """False if a stop was requested before: then there is nothing to do."""

        async def attempt() -> None:
            sent_at = boot_seconds()
            await self._register()
            self.state.on_answer(sent_at)

        try:
            await keep_trying(attempt, stop=self.over, name="register", log=self.log)
        except (*UNREACHABLE, NOT_ALLOWED) as error:
            self.log.warning("deregister_failed", error=error)
            return False
        except (Unauthenticated, UserError) as error:
            # The API will refuse it again: an operator has to act.
            self.ending = Ending.REFUSED
            self.log.error("join_refused", message=str(error))
            return False
        self.is_registered = True
        self.state.begin_idling(boot_seconds())
        self.log.info("runner_started", slots=self.me.slots, queues=",".join(self.me.queues), **served, pid=self.me.pid)
        return True

    async def _register(self) -> None:
        """Repeating a registration whose reply was lost is harmless. Two runners may have the same readable id; each
        logs a warning."""
        registered = await self.access.register(self.me)
        for pattern, problem in registered.unmatched:
            self.log.warning("pattern_unmatched", pattern=pattern, message=problem)
        place = this_process()
        for other in registered.namesakes:
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
                await self.access.leave()
        except (TimeoutError, psycopg.Error, EvertickError, OSError) as error:
            self.log.warning("deregister_failed", error=error, **{name: count() for name, count in left.items()})
        self.log.info("service_stopped", reason=self.ending.value)
