"""One session of a runner that drives a remote executor: claims what it can submit, and watches it until nothing is
left.

Its tick only reads the work list, decides and claims. All calls to the executor run in bounded worker pools, so that a
slow executor delays nothing. All state is in the database: the next session or another runner continues from there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import assert_never

from evertick.config import Settings
from evertick.db.queries import runners
from evertick.db.queries.runners import DispatchRow
from evertick.domain.agent_protocol import is_launched_name, parse_name
from evertick.domain.attempt import RunnerRequest
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable
from evertick.engine.remote_attempts import DispatchResult, adopt_dispatches, end_queued
from evertick.executors.base import Observed, Phase, RemoteExecutor
from evertick.executors.registry import api_url_for_agents, open_executor
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runner.access import Work
from evertick.runner.database_access import DatabaseAccess
from evertick.runner.events import EventQueue, HeartbeatAnswered, NotificationArrived, PeerDied
from evertick.runner.launch import VersionCache
from evertick.runner.registration import Registration, draw_runner, named_log
from evertick.runner.remote.endings import Action, Endings, action_for, problem_of
from evertick.runner.remote.submit import RemoteContext, Submitter, as_trouble, in_time, name_of, never_began
from evertick.runner.remote.worker_pool import SubmissionBackoff, WorkerPool
from evertick.runner.runner import Runner
from evertick.runner.state import Ending
from evertick.runtime.loop import back_off, run_loop
from evertick.secrets.agent_tokens import AgentTokens

MOST_ADOPTED = 1000

Event = HeartbeatAnswered | PeerDied | NotificationArrived


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
        wake = self._events.wake
        me = draw_runner(settings, request=request)
        log = named_log(log, me)
        access = DatabaseAccess(settings, url=url, me=me, log=log)
        registration = Registration(settings, access=access, me=me, log=log, events=self._events)
        self.registration, self._state, self._log = registration, registration.state, registration.log
        self._settings, self._executor = settings, executor
        self._hot, self._side, self._notifier, self._claims = access.hot, access.side, access.notifier, access.claims
        self.session = registration.session
        registration.has_other_work = lambda: bool(self._listed)
        self._listed: list[DispatchRow] = []
        # By the session of an attempt: since when its stop or end is known, the listing after which its last action was
        # chosen, and since when the executor reports it as running.
        self._asked: dict[int, float] = {}
        self._acted_on: dict[int, int] = {}
        self._running_since: dict[int, float] = {}
        self._backoff = SubmissionBackoff()
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

    async def run(self) -> Ending:
        registration = self.registration
        if await registration.register(executor=registration.me.executor):
            metrics.RUNNING.set_function(lambda: sum(row.state == "running" for row in self._listed))
            metrics.DISPATCH_QUEUE_DEPTH.set_function(lambda: self._submissions.waiting)
            await registration.serve(
                self.tick, executor=self._executor, group=asyncio.TaskGroup(), works=self._works, leave=self._leave
            )
        return registration.ending

    def _works(self) -> list[Work]:
        return [self._submissions.run(), self._actions.run(), self._observer.run()]

    async def tick(self) -> float:
        """Read the work list, schedule the actions that are due, and claim as much as there is room for."""
        self._apply_events()
        conn = await self._hot.get()
        silent_seconds = self._settings.lost_after_seconds / 3
        if adopted := await adopt_dispatches(
            conn, session=self.session, silent_seconds=silent_seconds, most=MOST_ADOPTED
        ):
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
                case NotificationArrived() | PeerDied():
                    # The tick reads everything.
                    pass
                case _:
                    assert_never(event)

    def _apply_heartbeat(self, event: HeartbeatAnswered) -> None:
        if event.reply.is_gone:
            self.registration.on_declared_dead(len(self._listed))
        elif self._state.on_answer(event.sent_at) and self._state.follow(event.reply.request):
            self.registration.on_request()

    def _free(self) -> int:
        if self._state.is_stopping or self._state.request is not None or not self._state.may_claim(boot_seconds()):
            if not self._listed:
                self.registration.on_idle()
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
        self._log.info("service_stopping", attempts=len(self._listed), reason=self.registration.ending.value)
        self._submissions.forget_waiting()
        if self.registration.ending is not Ending.DECLARED_DEAD:
            await self._finish_submissions()
        await self.registration.deregister(self._give_back)

    async def _finish_submissions(self) -> None:
        async with asyncio.TaskGroup() as group:
            waits = [
                group.create_task(self._submissions.wait_until_idle()),
                group.create_task(self.registration.hurry.wait()),
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_grace_seconds):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _give_back(self) -> None:
        if self.registration.ending is Ending.DECLARED_DEAD:
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


LIST_TICKS, LONGEST_LIST_SECONDS = 5, 5.0
# Every change is a signal, and a listing returns everything: with many changes, signals are collected for this share of
# the interval.
GATHER_SHARE = 0.1
MOST_ORPHANS = 100


class Observer:
    """Lists the executor's attempts of this installation, every few seconds and whenever the executor signals a change.
    Only the listing counts; the signal makes it early. An attempt that has no row in the work list is deleted: it was
    abandoned while it was being submitted.

    `latest` is the latest listing, None until there is one; `count` counts them, `wake` is set after each.
    """

    def __init__(self, context: RemoteContext, *, wake: asyncio.Event) -> None:
        self._context, self._wake_session = context, wake
        self.latest: Mapping[str, Observed] | None = None
        self.count = 0
        self._seconds = min(LIST_TICKS * context.settings.tick_seconds, LONGEST_LIST_SECONDS)
        self._backoff = SubmissionBackoff(longest_seconds=6 * self._seconds)
        self._wake = asyncio.Event()
        self._listed_at = -inf
        self._orphans: set[str] = set()
        self._deleted: set[str] = set()
        self._undeletable: set[str] = set()

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            await run_loop(self.tick, wake=self._wake, name="observe", log=self._context.log, is_essential=False)

    async def tick(self) -> float:
        await asyncio.sleep(max(self._listed_at + GATHER_SHARE * self._seconds - time.monotonic(), 0.0))
        self._wake.clear()
        try:
            seen = await in_time(self._context.executor.observe())
        except (ExecutorBusy, ExecutorUnavailable) as error:
            metrics.DISPATCH_FAILED.labels(reason="observe").inc()
            metrics.DISPATCH_LOST_LIST_ERROR.inc()
            after = error.retry_after_seconds if isinstance(error, ExecutorBusy) else None
            seconds = self._backoff.note_failure(after)
            self._context.log.warning("executor_unavailable", error=error, retry_in=seconds)
            # Signals must not make an executor that is already in trouble answer more often.
            await asyncio.sleep(seconds)
            return 0.0
        self._backoff.note_success()
        self._listed_at = time.monotonic()
        self.latest = seen
        self.count += 1
        self._wake_session.set()
        await self._delete_orphans(seen)
        return self._seconds

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                async for _ in self._context.executor.hints():
                    failures = 0
                    self._wake.set()
            except Exception as error:
                # Whatever the error: nothing depends on signals.
                self._context.log.warning("listen_failed", error=error)
            failures += 1
            await asyncio.sleep(back_off(failures))

    async def _delete_orphans(self, seen: Mapping[str, Observed]) -> None:
        """Rows are read after the listing and are created before an attempt is submitted: an attempt without a row then
        is an orphan. One that has ended and is being deleted is not: a kubelet takes a second or more to remove it."""
        here = [
            name
            for name, each in seen.items()
            if not is_launched_name(name) and (each.phase is not Phase.ENDED or not each.is_being_deleted)
        ]
        named = {name: attempt.session for name in here if (attempt := parse_name(name)) is not None}
        if not named:
            self._orphans, self._deleted, self._undeletable = set(), set(), set()
            return
        known = await runners.known(await self._context.link.get(), list(named.values()))
        orphans = {name for name, session in named.items() if session not in known}
        # Twice in a row, because an attempt that its own action is deleting stays visible for a moment. One that could
        # not be deleted is tried after all others, so that it does not block them.
        found = sorted((orphans & self._orphans) - self._deleted, key=lambda name: (name in self._undeletable, name))
        self._orphans, self._deleted, self._undeletable = orphans, self._deleted & orphans, self._undeletable & orphans
        for name in found[:MOST_ORPHANS]:
            if not await self._delete(name, seen[name].phase):
                break

    async def _delete(self, name: str, phase: Phase) -> bool:
        """Returns whether the executor deleted it."""
        self._context.log.warning("orphan_removed", attempt=name, phase=phase.value)
        try:
            await in_time(self._context.executor.cancel(name, self._context.settings.stop_grace_seconds))
        except (ExecutorBusy, ExecutorUnavailable) as error:
            self._undeletable.add(name)
            metrics.DISPATCH_FAILED.labels(reason="stray").inc()
            self._context.log.warning("executor_unavailable", attempt=name, error=error)
            return False
        if phase is Phase.ENDED:
            # The executor may keep it for inspection: one request is enough.
            self._deleted.add(name)
        return True
