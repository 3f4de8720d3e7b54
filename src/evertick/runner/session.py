"""Applies a heartbeat's answer to a runner: stops attempts that it lost or must stop, returns unknown claims, follows
drain requests.

The answer has two sides: attempts that this session no longer holds, and attempts recorded as its own that its list
lacked. Never starts or reports anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.finish_and_claim import Exchange
from evertick.engine.runners import Held, RunnerRequest
from evertick.executors.local.child_process import ExecutorLimits
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.process_pool import BundlePlace
from evertick.logs.shipper import LogShipper, last_lines, ship
from evertick.logs.spool import LogCap
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.linux import boot_seconds
from evertick.runner.exchange import Claims, report_outcomes, show_finished, show_refused
from evertick.runner.heartbeat import Beat, Heartbeat
from evertick.runner.housekeeping import keep_clean, keep_results, result_files
from evertick.runner.launch import Launcher, unpacked
from evertick.runner.peer_check import PeerCheck
from evertick.runner.registration import Ending, Registration, stop_within
from evertick.runner.state import DatabaseLiveness, DrainState, FailoverGuard, RunningAttempts
from evertick.runtime.connections import ReconnectingConnection, listen_forever
from evertick.runtime.loop import keep_trying, run_loop
from evertick.secrets.backends import SecretProvider
from evertick.storage.results import ResultTransfers

ASK_AGAIN_SECONDS = 0.2


# A canceled body must be gone within a second of the command (DESIGN, States); this is its time to clean up.
CANCEL_GRACE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReplies:
    """The heartbeat handler of one session. `hot` is the connection of its exchanges, `wake` wakes its loop,
    `ask_again` sends another heartbeat."""

    holding: RunningAttempts
    executor: LocalExecutor
    contact: DatabaseLiveness
    changeover: FailoverGuard
    duty: DrainState
    hot: ReconnectingConnection
    wake: asyncio.Event
    log: Log
    ask_again: Callable[[], None]
    on_buried: Callable[[], None]
    on_idle: Callable[[], None]

    def on_beat(self, beat: Beat) -> None:
        """A heartbeat was answered."""
        reply = beat.reply
        if reply.is_gone:
            self.on_buried()
        elif self.note_heard(beat.sent_at):
            self._obey(reply.request)
        if beat.by_spare and self.contact.is_step_suspect(beat.sent_at):
            # A new connection answers while the old one does not: requests sent on the old one may be lost.
            self.hot.cut()
        self._end(reply.lost, "lease lost", 0.0)
        self._end(reply.stop, "stop requested", CANCEL_GRACE_SECONDS)
        self.changeover.hear(beat.server, reply.lost)
        self._give_back(reply.unknown, beat.sent_at)

    def note_heard(self, sent_at: float) -> bool:
        """The database answered a request sent at that time. Returns whether that is the latest answer so far."""
        if not self.contact.may_claim(sent_at):
            self.wake.set()
        is_latest = self.contact.note_heard(sent_at)
        self.executor.keep_contact(self.contact.stop_at)
        return is_latest

    def _end(self, attempts: list[Held], reason: str, grace_seconds: float) -> None:
        for key, epoch in attempts:
            if self.holding.holds(key, epoch):
                self.executor.kill(key, epoch, reason, grace_seconds=grace_seconds)

    def _give_back(self, unknown: list[Held], sent_at: float) -> None:
        if self.contact.stepping_since is not None:
            if any(not self.holding.holds(*held) for held in unknown):
                # The reply in flight may carry them; ask again once it has arrived.
                asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self.ask_again)
            return
        if (count := self.holding.give_back(unknown, "claim_reply_lost")) > 0:
            metrics.CLAIMS_LOST.inc(count)
            self.log.warning("claim_reply_lost", attempts=count)
            self.wake.set()
        if self.contact.settle_doubt(sent_at):
            self.wake.set()

    def _obey(self, request: RunnerRequest | None) -> None:
        """Follow an operator's drain or undrain request."""
        if self.duty.hear(request):
            self.wake.set()
            self.on_idle()


MOST_REPORTS = 500


TELL_AGAIN_SECONDS = 5.0


class RunnerSession:
    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        log: Log,
        environment: Mapping[str, str] | None = None,
        request: RunnerRequest | None = None,
    ) -> None:
        """`request` is a drain request of the previous session that still applies."""
        stay = self._stay = Registration(settings, url=url, log=log, request=request)
        self.session, self.duty, self._log = stay.session, stay.duty, stay.log
        self._settings, self._url, self._environment = settings, url, environment
        self._hot, self._side, self._waker, self._contact = stay.hot, stay.side, stay.waker, stay.contact
        self._wake, self._over, self._hurry = stay.wake, stay.over, stay.hurry
        self._claiming = Claims(settings, session=self.session)
        self._holding = RunningAttempts(settings.runner_slots)
        self._changeover = FailoverGuard(self._holding.holds, ask=lambda: self._heartbeat.beat_now())
        cap = LogCap(head_bytes=settings.log_head_bytes, tail_bytes=settings.log_tail_bytes)
        self._executor = LocalExecutor(
            slots=settings.runner_slots,
            spool_dir=settings.spool_folder,
            session=self.session,
            resolve_bundle=self._place,
            on_outcomes=self._on_outcomes,
            limits=ExecutorLimits(log_cap=cap, results=result_files(settings)),
        )
        self._storing = ResultTransfers(settings, on_stored=self._on_stored, log=self._log)
        self._starting = Launcher(
            holding=self._holding,
            executor=self._executor,
            link=self._side,
            session=self.session,
            grants=SecretProvider(settings),
            storing=self._storing,
            on_started=self._on_started,
        )
        self._hearing = HeartbeatReplies(
            holding=self._holding,
            executor=self._executor,
            contact=self._contact,
            changeover=self._changeover,
            duty=self.duty,
            hot=self._hot,
            wake=self._wake,
            log=self._log,
            ask_again=lambda: self._heartbeat.beat_now(),
            on_buried=self._on_buried,
            on_idle=self._look_if_idle,
        )
        spool, poll = settings.spool_folder, self._executor.poll_logs
        self._logs = LogShipper(url, spool=spool, session=self.session, poll=poll, log=self._log)
        self._neighbours = PeerCheck(settings, link=self._side, on_buried=self._on_neighbour_buried, log=self._log)

    def leave(self) -> None:
        """End the session: running attempts may finish within the grace period, the rest is returned."""
        self._stay.leave()

    def hurry(self) -> None:
        """End the session without a grace period."""
        self._stay.leave_at_once()

    async def run(self) -> Ending:
        self._settings.spool_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        served = {"match": ",".join(self._stay.me.match)} if self._stay.me.match else {}
        if not await self._stay.begin(self._hearing.note_heard, self._look_around, **served):
            return self._stay.ending
        self._heartbeat = Heartbeat(
            self._settings,
            url=self._url,
            session=self.session,
            held=self._holding.held,
            on_beat=self._hearing.on_beat,
            log=self._log,
        )
        self._heartbeat.start()
        metrics.RUNNING.set_function(lambda: self._holding.active)
        async with self._executor, asyncio.TaskGroup() as group:
            works = [self._waker.run(), self._logs.run(), self._logs.run_late(), self._neighbours.run()]
            works.append(keep_clean(self._settings.bundles_folder, self._executor, log=self._log))
            works.append(keep_results(self._settings, link=self._side, log=self._log))
            if self._settings.notify:
                works.append(listen_forever(self._url, _HEARD, self._on_wake, log=self._log))
            background = [group.create_task(work) for work in works]
            await run_loop(self.tick, wake=self._wake, stop=self._over, name="runner", log=self._log)
            await self._leave()
            for task in background:
                task.cancel()
        self._heartbeat.stop()
        await self._stay.close()
        return self._stay.ending

    async def tick(self) -> float:
        """Report ended attempts and claim as many tasks as there are free slots, in one round trip."""
        self._starting.start_soon()
        may_claim = not self._stay.is_leaving and self.duty.is_free and self._contact.may_claim(boot_seconds())
        free = self._holding.free if may_claim else 0
        ended, since = self._holding.take_ended(MOST_REPORTS)
        if not ended and free <= 0:
            self._look_if_idle()
            return self._settings.tick_seconds
        self._contact.stepping_since = boot_seconds()
        try:
            told = await report_outcomes(self._send, ended, free, log=self._log)
        except BaseException:
            # The result of the commit is unknown; sending the same reports again is harmless.
            self._holding.put_back(ended)
            if free > 0:
                self._contact.doubt(boot_seconds())
                self._heartbeat.beat_now()
            raise
        finally:
            self._contact.stepping_since = None
        # Before the first await: a heartbeat in between must not mistake these for claims whose reply was lost.
        self._holding.hold(told.stepped.claims)
        self._forget([outcome for outcome in ended if outcome not in told.unstored])
        if told.unstored:
            asyncio.get_running_loop().call_later(TELL_AGAIN_SECONDS, self._tell_again, told.unstored)
        await self._follow_up(told.stepped, ended, since)
        return 0.0 if self._holding.has_ended or told.stepped.is_walking else self._settings.tick_seconds

    async def _send(self, ended: list[Outcome], free: int) -> Exchange:
        conn, server = await self._hot.get(), self._hot.server
        reports = [self._holding.as_report(outcome) for outcome in ended]
        done = await self._claiming.step(conn, reports, self._changeover.allow(free, server))
        self._changeover.note_step(server)
        return done

    async def _follow_up(self, done: Exchange, ended: list[Outcome], since: float | None) -> None:
        if done.has_more:
            self._waker.wake(Channel.READY)
        if done.has_arrivals or any(outcome.kind in _MAY_WAIT for outcome in ended):
            self._waker.wake(Channel.PLAN)
        if done.refused:
            await self._drop(done.refused, ended)
        if done.claims:
            metrics.CLAIMS.inc(len(done.claims))
            await self._starting.start(done.claims, since)
        self._look_if_idle()

    def _tell_again(self, outcomes: list[Outcome]) -> None:
        self._holding.put_back(outcomes)
        self._wake.set()

    async def _look_around(self, conn: AsyncConnection) -> None:
        await self._claiming.warn_if_idle(conn, log=self._log)

    def _on_started(self) -> None:
        self._logs.is_busy = True
        self._logs.wake.set()
        if self._holding.has_ended:
            self._wake.set()

    def _on_outcomes(self, outcomes: list[Outcome]) -> None:
        """The executor calls this in the session's loop when attempts have ended and their processes are gone."""
        self._on_stored(self._storing.hold_back(outcomes))

    def _on_stored(self, outcomes: list[Outcome]) -> None:
        """Their results are stored where every runner can read them: the attempts have ended."""
        self._holding.end(outcomes)
        self._wake.set()
        self._logs.is_busy = self._holding.active > 0
        if not self._holding.active:
            self._logs.wake.set()

    def _forget(self, ended: list[Outcome]) -> None:
        """Their reports are stored."""
        self._executor.settle([(outcome.key, outcome.epoch) for outcome in ended])
        show_finished(self._holding.forget(ended), log=self._log)

    async def _drop(self, refused: list[Held], ended: list[Outcome]) -> None:
        """These attempts were taken away: nothing of theirs is stored except, late, their log."""
        show_refused(refused, log=self._log)
        late = [last_lines(outcome) for outcome in ended if outcome.log and (outcome.key, outcome.epoch) in refused]
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            await ship(await self._side.get(), session=self.session, chunks=late)

    def _on_buried(self) -> None:
        self._stay.note_burial(self._holding.active)

    def _look_if_idle(self) -> None:
        if self._contact.is_certain and not self._holding.active and not self._holding.has_ended:
            self._stay.note_idle()

    def _on_neighbour_buried(self) -> None:
        self._waker.wake(Channel.READY)
        self._wake.set()

    def _on_wake(self, channel: Channel) -> None:
        match channel:
            case Channel.STOP:
                self._heartbeat.beat_now()
            case Channel.JOIN:
                self._neighbours.ask()
            case _:
                self._wake.set()

    async def _place(self, bundle: str, file: str) -> BundlePlace:
        async def find() -> BundlePlace:
            path, uses_threads = await unpacked(await self._side.get(), bundle, self._settings.bundles_folder)
            return BundlePlace(path=path, uses_threads=uses_threads, environment=self._environment)

        return await keep_trying(find, stop=self._over, name="bundles", log=self._log)

    async def _leave(self) -> None:
        """Let attempts finish within the grace period, stop the rest, report all outcomes, and deregister."""
        self._stay.is_leaving = True
        self._log.info("stopping", attempts=self._holding.active, reason=self._stay.ending.value)
        is_over = asyncio.Event()

        async def stop_attempts() -> None:
            grace = 0.0 if self._stay.ending is Ending.BURIED else self._settings.stop_grace_seconds
            await stop_within(self._executor, grace, self._hurry)
            await self._storing.give_up()
            is_over.set()
            self._wake.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(stop_attempts())
            await run_loop(self.tick, wake=self._wake, stop=is_over, name="runner", log=self._log)
        await self._stay.say_goodbye(self._tell_the_rest, unreported=lambda: self._holding.unreported)

    async def _tell_the_rest(self) -> None:
        while self._holding.has_ended:
            await self.tick()


_HEARD = [Channel.READY, Channel.STOP, Channel.JOIN]


# Notify the planner of tasks that have to wait for a time.
_MAY_WAIT = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.KILLED, OutcomeKind.LOST, OutcomeKind.DEFERRED)
