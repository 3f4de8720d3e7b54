"""One session of a runner that drives a remote executor: claims what it can submit, and watches it until nothing is
left.

Its tick only reads the work list, decides and claims. All calls to the executor run in bounded worker pools, so that a
slow executor delays nothing. All state is in the database: the next session or another runner continues from there.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.db.queries.runners import DispatchRow
from evertick.engine.remote_attempts import DispatchResult, NotStarted, end_queued
from evertick.engine.runners import Held, RunnerRequest
from evertick.executors.base import Observed, Phase, RemoteExecutor
from evertick.executors.registry import api_url_for_agents, open_executor
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.linux import boot_seconds
from evertick.runner.exchange import DispatchClaiming
from evertick.runner.heartbeat import Beat, Heartbeat
from evertick.runner.housekeeping import keep_results
from evertick.runner.launch import VersionCache
from evertick.runner.peer_check import PeerCheck
from evertick.runner.registration import Ending, Registration
from evertick.runner.remote.endings import Action, Endings, action_for, trouble_of
from evertick.runner.remote.observe import Observer
from evertick.runner.remote.submit import RemoteContext, Submitter, as_trouble, name_of, not_started
from evertick.runner.remote.worker_pool import Backoff, WorkerPool
from evertick.runner.runner import Runner
from evertick.runtime.connections import listen_forever
from evertick.runtime.loop import run_loop
from evertick.secrets.agent_tokens import AgentTokens

MOST_ADOPTED = 1000


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
        stay = self._stay = Registration(settings, url=url, log=log, request=request)
        self.session, self.duty, self._log = stay.session, stay.duty, stay.log
        self._settings, self._url, self._executor = settings, url, executor
        self._hot, self._side, self._waker, self._contact = stay.hot, stay.side, stay.waker, stay.contact
        self._wake = stay.wake
        self._claiming = DispatchClaiming(settings, session=self.session)
        self._listed: list[DispatchRow] = []
        self._asked: dict[int, float] = {}
        self._done_at: dict[int, int] = {}
        self._running_since: dict[int, float] = {}
        self._pause = Backoff()
        self._api_url = api_url_for_agents(settings)
        desk = RemoteContext(
            settings=settings,
            executor=executor,
            owner=self.session,
            link=self._side,
            versions=VersionCache(),
            tokens=tokens,
            api_url=self._api_url,
            log=self._log,
            end=self._end,
            wake=self._wake_others,
        )
        workers, on_done = settings.dispatch_workers, self._wake.set
        self._pool = WorkerPool(
            name="dispatch", workers=workers, queue=settings.dispatch_queue, on_done=on_done, log=self._log
        )
        # As many as the list can hold: the list is bounded by the slots, and adopted attempts must not be rejected.
        self._chores = WorkerPool(
            name="chores", workers=workers, queue=runners.MOST_LISTED, on_done=on_done, log=self._log
        )
        self._submitting, self._ends = Submitter(desk, pool=self._pool, pause=self._pause), Endings(desk)
        self._observing = Observer(desk, on_look=self._wake.set)
        self._neighbours = PeerCheck(settings, link=self._side, on_buried=self._wake.set, log=self._log)

    def leave(self) -> None:
        """End the session: submissions in progress may finish within the grace period, attempts not yet tried are
        returned to the queue."""
        self._stay.leave()

    def hurry(self) -> None:
        """End the session without a grace period."""
        self._stay.leave_at_once()

    async def run(self) -> Ending:
        if not await self._stay.begin(self._contact.note_heard, self._look_around, executor=self._stay.me.executor):
            return self._stay.ending
        self._heartbeat = Heartbeat(
            self._settings, url=self._url, session=self.session, held=_nothing, on_beat=self._on_beat, log=self._log
        )
        self._heartbeat.start()
        metrics.RUNNING.set_function(lambda: sum(row.state == "running" for row in self._listed))
        metrics.DISPATCH_QUEUE_DEPTH.set_function(lambda: self._pool.waiting)
        async with self._executor, asyncio.TaskGroup() as group:
            works = [
                self._waker.run(),
                self._pool.run(),
                self._chores.run(),
                self._observing.run(),
                self._neighbours.run(),
                keep_results(self._settings, link=self._side, log=self._log),
            ]
            if self._settings.notify:
                works.append(listen_forever(self._url, _HEARD, self._on_wake, log=self._log))
            background = [group.create_task(work) for work in works]
            await run_loop(self.tick, wake=self._wake, stop=self._stay.over, name="runner", log=self._log)
            await self._leave()
            for task in background:
                task.cancel()
        self._heartbeat.stop()
        await self._stay.close()
        return self._stay.ending

    async def tick(self) -> float:
        """Read the work list, schedule the actions that are due, and claim as much as there is room for."""
        conn = await self._hot.get()
        silent_seconds = self._settings.lost_after_seconds / 3
        if adopted := await runners.adopt(conn, session=self.session, silent_seconds=silent_seconds, most=MOST_ADOPTED):
            self._log.warning("adopt", attempts=adopted)
        self._listed = await runners.list_of(conn, owner=self.session)
        self._forget_unlisted()
        for row in self._listed:
            self._attend(row)
        free = self._free()
        if free <= 0:
            return self._settings.tick_seconds
        claimed = await self._claiming.claim(conn, free)
        metrics.CLAIMS.inc(claimed)
        # Claimed attempts are on the list now, and are read from there like all others.
        return 0.0 if claimed else self._settings.tick_seconds

    def _free(self) -> int:
        if self._stay.is_leaving or not self.duty.is_free or not self._contact.may_claim(boot_seconds()):
            self._look_if_idle()
            return 0
        waiting = sum(action_is_allowed(row) and not self._pool.has(row.session) for row in self._listed)
        free = min(self._settings.runner_slots - len(self._listed), self._pool.room - waiting)
        if free <= 0 or not self._pause.is_over:
            metrics.DISPATCH_AT_CAPACITY.inc()
            return 0
        return free

    def _attend(self, row: DispatchRow) -> None:
        """Schedule the next action of this attempt, unless one is in progress or was done since the last listing."""
        # An attempt that waits for submission may be stopped: its submission is then refused.
        is_in_hand = self._pool.has(row.session) if row.request is None else self._pool.is_busy_with(row.session)
        if is_in_hand or self._chores.has(row.session):
            return
        now, looks = time.monotonic(), self._observing.looks
        shall_end = row.request is not None or row.state is None
        asked_at = self._asked.setdefault(row.session, now) if shall_end else now
        seen = (self._observing.seen or {}).get(name_of(row))
        chore = action_for(
            row,
            seen,
            lost_after_seconds=self._settings.dispatch_lost_seconds,
            asked_seconds=now - asked_at,
            grace_seconds=self._settings.stop_grace_seconds,
        )
        if chore is Action.SUBMIT:
            if not self._stay.is_leaving and self._pause.is_over:
                self._submitting.offer(row)
        elif chore is not None and self._done_at.get(row.session) != looks:
            self._done_at[row.session] = looks
            self._chores.offer(row.session, lambda: self._ends.carry_out(chore, row, seen))
        elif chore is None:
            self._note_trouble(row, seen, now)

    def _note_trouble(self, row: DispatchRow, seen: Observed | None, now: float) -> None:
        is_running = seen is not None and seen.phase is Phase.RUNNING
        since = self._running_since.setdefault(row.session, now) if is_running else now
        found = trouble_of(row, seen, running_seconds=now - since, api_url=self._api_url)
        if found is None or (trouble := as_trouble(found)) == row.trouble:
            return
        told = {"session": row.session, "trouble": trouble, "seconds": None}

        async def note() -> None:
            self._log.warning("not_begun", attempt=name_of(row), error=trouble)
            await runners.note_troubles(await self._side.get(), owner=self.session, troubles=[told])

        self._chores.offer(row.session, note)

    def _forget_unlisted(self) -> None:
        listed = {row.session for row in self._listed}
        self._asked = {session: at for session, at in self._asked.items() if session in listed}
        self._done_at = {session: looks for session, looks in self._done_at.items() if session in listed}
        self._running_since = {session: at for session, at in self._running_since.items() if session in listed}
        self._submitting.forget(listed)

    async def _end(self, end: NotStarted) -> bool:
        done = await end_queued(await self._side.get(), [end], infra_retries=self._settings.infra_retries)
        self._wake_others()
        return bool(done.moved_sessions)

    def _wake_others(self) -> None:
        self._waker.wake(Channel.READY)
        self._waker.wake(Channel.PLAN)

    async def _look_around(self, conn: AsyncConnection) -> None:
        await self._claiming.warn_if_idle(conn, log=self._log)

    def _on_beat(self, beat: Beat) -> None:
        if beat.reply.is_gone:
            self._stay.note_burial(len(self._listed))
        elif self._contact.note_heard(beat.sent_at) and self.duty.hear(beat.reply.request):
            self._wake.set()

    def _look_if_idle(self) -> None:
        if not self._listed:
            self._stay.note_idle()

    def _on_wake(self, channel: Channel) -> None:
        match channel:
            case Channel.STOP:
                self._heartbeat.beat_now()
            case Channel.JOIN:
                self._neighbours.ask()
            case _:
                pass
        self._wake.set()

    async def _leave(self) -> None:
        """Finish submissions in progress, return attempts that were never tried, and leave the rest to the next
        session."""
        self._stay.is_leaving = True
        self._log.info("stopping", attempts=len(self._listed), reason=self._stay.ending.value)
        self._pool.forget_waiting()
        if self._stay.ending is not Ending.BURIED:
            await self._finish_handing_over()
        await self._stay.say_goodbye(self._give_back)

    async def _finish_handing_over(self) -> None:
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(self._pool.wait_until_idle()), group.create_task(self._stay.hurry.wait())]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_grace_seconds):
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _give_back(self) -> None:
        if self._stay.ending is Ending.BURIED:
            return
        conn = await self._side.get()
        rows = [
            row for row in await runners.list_of(conn, owner=self.session) if row.state == "queued" and not row.tries
        ]
        if rows:
            ends = [
                not_started(row, DispatchResult.GIVEN_BACK, "its runner stopped before it was submitted")
                for row in rows
            ]
            await end_queued(conn, ends, infra_retries=self._settings.infra_retries)
            self._wake_others()


def action_is_allowed(row: DispatchRow) -> bool:
    """Whether it has yet to be submitted."""
    return row.state == "queued" and not row.is_submitted


def _nothing() -> list[Held]:
    """This runner executes nothing itself: its attempts have their own leases, which their agents extend."""
    return []


_HEARD = [Channel.READY, Channel.STOP, Channel.JOIN]


def make_dispatcher(settings: Settings, *, url: str, log: Log) -> Runner:
    """Raises InvalidSettings for an unusable executor, address or key: at startup, not when the first task arrives."""
    api_url_for_agents(settings)
    tokens, first = AgentTokens(settings), [open_executor(settings)]

    def begin(request: RunnerRequest | None) -> RemoteSession:
        executor = first.pop() if first else open_executor(settings)
        return RemoteSession(settings, url=url, log=log, executor=executor, tokens=tokens, request=request)

    return Runner(settings, url=url, log=log, begin=begin)
