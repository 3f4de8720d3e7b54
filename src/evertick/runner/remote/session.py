"""One session of a runner that drives a remote executor: claims what it can submit, and watches it until nothing is
left.

Its tick only reads the work list, decides and claims. All calls to the executor run in bounded worker pools, so that a
slow executor delays nothing. All state is in the database: the next session or another runner continues from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import assert_never

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.db.queries.runners import DispatchRow
from evertick.domain.attempt import AttemptRef, RunnerRequest
from evertick.engine.remote_attempts import DispatchResult, end_queued
from evertick.executors.base import Observed, Phase, RemoteExecutor
from evertick.executors.registry import api_url_for_agents, open_executor
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.linux import boot_seconds
from evertick.runner.events import EventQueue, HeartbeatAnswered, PeerDied, Woken
from evertick.runner.exchange import Claims
from evertick.runner.heartbeat import Heartbeat
from evertick.runner.housekeeping import clean_results
from evertick.runner.launch import VersionCache
from evertick.runner.peer_check import PeerCheck
from evertick.runner.registration import Registration
from evertick.runner.remote.endings import Action, Endings, action_for, problem_of
from evertick.runner.remote.observe import Observer
from evertick.runner.remote.submit import RemoteContext, Submitter, as_trouble, name_of, never_began
from evertick.runner.remote.worker_pool import Backoff, WorkerPool
from evertick.runner.runner import Runner
from evertick.runner.state import Ending
from evertick.runtime.connections import listen_forever
from evertick.runtime.loop import run_loop
from evertick.secrets.agent_tokens import AgentTokens

MOST_ADOPTED = 1000

Event = HeartbeatAnswered | PeerDied | Woken


def make_remote_runner(settings: Settings, *, url: str, log: Log) -> Runner:
    """A runner whose attempts run elsewhere. Raises InvalidSettings for an unusable executor, address or key: at
    startup, not when the first task arrives."""
    api_url_for_agents(settings)
    tokens, first = AgentTokens(settings), [open_executor(settings)]

    def begin(request: RunnerRequest | None) -> RemoteSession:
        executor = first.pop() if first else open_executor(settings)
        return RemoteSession(settings, url=url, log=log, executor=executor, tokens=tokens, request=request)

    return Runner(settings, url=url, log=log, begin=begin)


class RemoteSession:
    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        log: Log,
        executor: RemoteExecutor,
        tokens: AgentTokens,
        request: RunnerRequest | None,
    ) -> None:
        """`executor` is entered here. `request` is a drain request of the previous session that still applies."""
        self._events = EventQueue[Event]()
        wake, put = self._events.wake, self._events.put
        registration = Registration(settings, url=url, log=log, request=request, wake=wake)
        self._registration, self._state, self._log = registration, registration.state, registration.log
        self._settings, self._url, self._executor = settings, url, executor
        self._hot, self._side, self._notifier = registration.hot, registration.side, registration.notifier
        self._wake, self.session = wake, registration.session
        self._claims = Claims(settings, session=self.session, log=self._log)
        self._listed: list[DispatchRow] = []
        # By the session of an attempt: since when its stop or end is known, the listing after which its last action was
        # chosen, and since when the executor reports it as running.
        self._asked: dict[int, float] = {}
        self._acted_on: dict[int, int] = {}
        self._running_since: dict[int, float] = {}
        self._backoff = Backoff()
        self._context = RemoteContext(
            settings=settings,
            executor=executor,
            owner=self.session,
            link=self._side,
            notifier=self._notifier,
            versions=VersionCache(),
            tokens=tokens,
            api_url=api_url_for_agents(settings),
            log=self._log,
        )
        workers = settings.dispatch_workers
        self._submissions = WorkerPool(
            name="dispatch", workers=workers, queue=settings.dispatch_queue, wake=wake, log=self._log
        )
        # As many as the list can hold: the list is bounded by the slots, and adopted attempts must not be rejected.
        self._actions = WorkerPool(name="chores", workers=workers, queue=runners.MOST_LISTED, wake=wake, log=self._log)
        self._submitter = Submitter(self._context, pool=self._submissions, backoff=self._backoff)
        self._endings = Endings(self._context)
        self._observer = Observer(self._context, wake=wake)
        # Its attempts have their own leases, which their agents extend: this runner holds none.
        self._heartbeat = Heartbeat(settings, url=url, session=self.session, held=_no_attempts, put=put, log=self._log)
        self._peers = PeerCheck(settings, link=self._side, put=put, log=self._log)

    @property
    def request(self) -> RunnerRequest | None:
        return self._state.request

    def stop(self) -> None:
        """End the session: submissions in progress may finish within the grace period, attempts not yet tried are
        returned to the queue."""
        self._registration.stop()

    def stop_now(self) -> None:
        """End the session without a grace period."""
        self._registration.stop_now()

    async def run(self) -> Ending:
        registration = self._registration
        if not await registration.register(self._claims.check_patterns, executor=registration.me.executor):
            return registration.ending
        self._heartbeat.start()
        metrics.RUNNING.set_function(lambda: sum(row.state == "running" for row in self._listed))
        metrics.DISPATCH_QUEUE_DEPTH.set_function(lambda: self._submissions.waiting)
        async with self._executor, asyncio.TaskGroup() as group:
            background = [group.create_task(work) for work in self._background()]
            await run_loop(self.tick, wake=self._wake, stop=registration.over, name="runner", log=self._log)
            await self._leave()
            for task in background:
                task.cancel()
        self._heartbeat.stop()
        await registration.close()
        return registration.ending

    def _background(self) -> list[Coroutine[None, None, None]]:
        works = [self._notifier.run(), self._submissions.run(), self._actions.run(), self._observer.run()]
        works += [self._peers.run(), clean_results(self._settings, link=self._side, log=self._log)]
        if self._settings.listen_notify:
            channels = [Channel.TASKS, Channel.STOP, Channel.RUNNER]
            works.append(listen_forever(self._url, channels, self._put_notification, log=self._log))
        return works

    async def tick(self) -> float:
        """Read the work list, schedule the actions that are due, and claim as much as there is room for."""
        self._apply_events()
        conn = await self._hot.get()
        silent_seconds = self._settings.lost_after_seconds / 3
        if adopted := await runners.adopt(conn, session=self.session, silent_seconds=silent_seconds, most=MOST_ADOPTED):
            self._log.warning("dispatch_adopted", attempts=adopted)
        self._listed = await runners.list_of(conn, owner=self.session)
        self._forget_unlisted()
        for row in self._listed:
            self._schedule_action(row)
        free = self._free()
        if free <= 0:
            return self._settings.tick_seconds
        claimed = await self._claims.claim_for_dispatch(conn, free)
        metrics.CLAIMS.inc(claimed)
        # Claimed attempts are on the list now, and are read from there like all others.
        return 0.0 if claimed else self._settings.tick_seconds

    def _apply_events(self) -> None:
        for event in self._events.take():
            match event:
                case HeartbeatAnswered():
                    self._apply_heartbeat(event)
                case Woken(channel=Channel.STOP):
                    self._heartbeat.beat_now()
                case Woken(channel=Channel.RUNNER):
                    self._peers.list_soon()
                case Woken() | PeerDied():
                    # The tick reads everything.
                    pass
                case _:
                    assert_never(event)

    def _apply_heartbeat(self, event: HeartbeatAnswered) -> None:
        if event.reply.is_gone:
            self._registration.on_declared_dead(len(self._listed))
        elif self._state.on_answer(event.sent_at) and self._state.follow(event.reply.request):
            self._registration.on_request()

    def _put_notification(self, channel: Channel) -> None:
        self._events.put(Woken(channel))

    def _free(self) -> int:
        if self._state.is_stopping or self._state.request is not None or not self._state.may_claim(boot_seconds()):
            if not self._listed:
                self._registration.on_idle()
            return 0
        waiting = sum(needs_submission(row) and not self._submissions.has(row.session) for row in self._listed)
        free = min(self._settings.runner_slots - len(self._listed), self._submissions.room - waiting)
        if free <= 0 or not self._backoff.is_over:
            metrics.DISPATCH_AT_CAPACITY.inc()
            return 0
        return free

    def _schedule_action(self, row: DispatchRow) -> None:
        """Schedule the next action of this attempt, unless one is in progress or was done since the last listing."""
        pool = self._submissions
        # An attempt that waits for submission may be stopped: its submission is then refused.
        is_in_hand = pool.has(row.session) if row.request is None else pool.is_busy_with(row.session)
        if is_in_hand or self._actions.has(row.session):
            return
        now, listing = time.monotonic(), self._observer.count
        is_ending = row.request is not None or row.state is None
        asked_at = self._asked.setdefault(row.session, now) if is_ending else now
        seen = (self._observer.latest or {}).get(name_of(row))
        action = action_for(
            row,
            seen,
            lost_after_seconds=self._settings.dispatch_lost_seconds,
            asked_seconds=now - asked_at,
            grace_seconds=self._settings.stop_grace_seconds,
        )
        if action is Action.SUBMIT:
            if not self._state.is_stopping and self._backoff.is_over:
                self._submitter.enqueue(row)
        elif action is not None and self._acted_on.get(row.session) != listing:
            self._acted_on[row.session] = listing
            self._actions.enqueue(row.session, lambda: self._endings.carry_out(action, row, seen))
        elif action is None:
            self._note_problem(row, seen, now)

    def _note_problem(self, row: DispatchRow, seen: Observed | None, now: float) -> None:
        is_running = seen is not None and seen.phase is Phase.RUNNING
        since = self._running_since.setdefault(row.session, now) if is_running else now
        found = problem_of(row, seen, running_seconds=now - since, api_url=self._context.api_url)
        if found is None or (trouble := as_trouble(found)) == row.trouble:
            return
        noted = {"session": row.session, "trouble": trouble, "seconds": None}

        async def note() -> None:
            self._log.warning("attempt_not_started", attempt=name_of(row), error=trouble)
            await runners.note_troubles(await self._side.get(), owner=self.session, troubles=[noted])

        self._actions.enqueue(row.session, note)

    def _forget_unlisted(self) -> None:
        listed = {row.session for row in self._listed}
        self._asked = {session: at for session, at in self._asked.items() if session in listed}
        self._acted_on = {session: listing for session, listing in self._acted_on.items() if session in listed}
        self._running_since = {session: at for session, at in self._running_since.items() if session in listed}
        self._submitter.forget(listed)

    async def _leave(self) -> None:
        """Finish submissions in progress, return attempts that were never tried, and leave the rest to the next
        session."""
        self._state.is_stopping = True
        self._log.info("service_stopping", attempts=len(self._listed), reason=self._registration.ending.value)
        self._submissions.forget_waiting()
        if self._registration.ending is not Ending.DECLARED_DEAD:
            await self._finish_submissions()
        await self._registration.deregister(self._give_back)

    async def _finish_submissions(self) -> None:
        async with asyncio.TaskGroup() as group:
            waits = [
                group.create_task(self._submissions.wait_until_idle()),
                group.create_task(self._registration.hurry.wait()),
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_grace_seconds):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _give_back(self) -> None:
        if self._registration.ending is Ending.DECLARED_DEAD:
            return
        conn = await self._side.get()
        rows = [
            row for row in await runners.list_of(conn, owner=self.session) if row.state == "queued" and not row.tries
        ]
        if rows:
            reason = "its runner stopped before it was submitted"
            ends = [never_began(row, DispatchResult.GIVEN_BACK, reason) for row in rows]
            await end_queued(conn, ends, infra_retries=self._settings.infra_retries)
            self._context.notify()


def needs_submission(row: DispatchRow) -> bool:
    """Whether it has yet to be submitted."""
    return row.state == "queued" and not row.is_submitted


def _no_attempts() -> list[AttemptRef]:
    return []
