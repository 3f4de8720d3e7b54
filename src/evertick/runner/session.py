"""One session of a runner: claims tasks that it can start now, drives the executor, and reports outcomes.

One state record, one event queue, and one exchange in flight: attempts that end meanwhile form the next batch, so
batches grow with the load and no timer delays a task. Never starts what it has not claimed, and never claims more than
it has slots for (K8, K11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, assert_never

import psycopg

from evertick.bundles.airflow_python import FORK_SERVER_MODULES, AirflowPython
from evertick.bundles.environments import Environments
from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries.runners import NewRunner
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.attempt import FORK_SERVER_MARK, AttemptOrder, AttemptRef, Outcome, RunnerRequest, TaskKey
from evertick.domain.errors import EvertickError
from evertick.domain.failover import Server
from evertick.engine.finish_and_claim import Exchange, encode_report
from evertick.executors.local.child_process import ExecutorLimits
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.fork_server_client import BundlePlace, unused_mark
from evertick.logs.shipper import LogShipper, last_lines, ship
from evertick.logs.spool import LogCap
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runner.access import EngineAccess, Report, Work
from evertick.runner.database_access import DatabaseAccess
from evertick.runner.events import (
    EventQueue,
    HeartbeatAnswered,
    LaunchFailed,
    NotificationArrived,
    Outcomes,
    PeerDied,
    ResultStored,
)
from evertick.runner.exchange import (
    ReportResult,
    Uploads,
    log_finished,
    log_refused,
    report_outcomes,
    waits_for_trigger,
)
from evertick.runner.housekeeping import clean_bundles, clean_environments
from evertick.runner.http_access import HttpAccess
from evertick.runner.launch import Launcher, unpacked
from evertick.runner.registration import Registration, draw_runner, named_log
from evertick.runner.round_trips import RoundTrips
from evertick.runner.state import Ending, NextExchange
from evertick.runner.triggers import Triggers
from evertick.runtime.loop import keep_trying, run_loop
from evertick.secrets.backends import SecretProvider
from evertick.storage.results import result_files

REPORT_AGAIN_SECONDS = 5.0
# The longest wait for the code of a DAG version, before its attempts are returned to the queue.
FETCH_SECONDS = 600.0
# A heartbeat is repeated after this time if an exchange in flight may explain the claims that it listed.
ASK_AGAIN_SECONDS = 0.2
# A canceled body must be gone within a second of the command (DESIGN, States); this is its time to clean up.
CANCEL_GRACE_SECONDS = 0.5
# A task that was claimed in advance is returned if no slot becomes free for it.
LONGEST_QUEUED_SECONDS = 2.0

Event = Outcomes | ResultStored | LaunchFailed | HeartbeatAnswered | PeerDied | NotificationArrived


def open_access(settings: Settings, *, url: str, me: NewRunner, log: Log) -> EngineAccess:
    """`url` is the address of the database, or of a server."""
    if url.startswith(("http://", "https://")):
        return HttpAccess(settings, server=url, me=me, log=log)
    return DatabaseAccess(settings, url=url, me=me, log=log)


class LocalSession:
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
        self._events = EventQueue[Event]()
        self._wake, put = self._events.wake, self._events.put
        me = draw_runner(settings, request=request)
        self._log = log = named_log(log, me)
        self._access = open_access(settings, url=url, me=me, log=log)
        registration = Registration(settings, access=self._access, me=me, log=log, events=self._events)
        self.registration, self._state = registration, registration.state
        self._settings, self._environment = settings, environment
        self._environments = Environments(settings, environment)
        self.session = registration.session
        # Entered by `run`: every task of the session is a member.
        self._group = asyncio.TaskGroup()
        cap = LogCap(head_bytes=settings.log_head_bytes, tail_bytes=settings.log_tail_bytes)
        self._executor = LocalExecutor(
            slots=settings.runner_slots,
            spool_dir=settings.spool_folder,
            session=self.session,
            resolve_bundle=self._bundle_place,
            put=lambda outcomes: put(Outcomes(outcomes)),
            answer=self._answer,
            limits=ExecutorLimits(log_cap=cap, results=result_files(settings)),
        )
        mark = FORK_SERVER_MARK, unused_mark(self._executor.spool)
        self._airflow = AirflowPython(settings, environment, FORK_SERVER_MODULES, mark=mark)
        self._uploads = Uploads(self._access.transfers, put=put, group=self._group)
        self._launcher = Launcher(
            state=self._state,
            executor=self._executor,
            access=self._access,
            grants=SecretProvider(settings),
            put=put,
            group=self._group,
        )
        self._triggers = Triggers(
            settings,
            state=self._state,
            executor=self._executor,
            access=self._access,
            on_available=self._on_available,
            on_idle=self._exit_if_idle,
            log=self._log,
        )
        spool, poll = settings.spool_folder, self._executor.poll_logs
        registration.has_other_work = lambda: not self._triggers.is_idle
        self._logs = LogShipper(self._access.open_logs, spool=spool, session=self.session, poll=poll, log=self._log)
        self._round_trips = RoundTrips(settings.runner_slots)
        # When to look for tasks although nothing has happened, and whether something has happened.
        self._poll_at, self._is_exchange_due = 0.0, False

    async def run(self) -> Ending:
        registration = self.registration
        self._settings.spool_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        served = {"match": ",".join(registration.me.match)} if registration.me.match else {}
        if await registration.register(**served):
            self._executor.extend_lease(self._state.stop_at)
            metrics.RUNNING.set_function(lambda: self._state.active)
            await self._airflow.start()
            try:
                await registration.serve(
                    self.tick, executor=self._executor, group=self._group, works=self._works, leave=self._leave
                )
            finally:
                self._airflow.close()
        return registration.ending

    def _works(self) -> list[Work]:
        cleaning = clean_bundles(self._settings.bundles_folder, lambda: self._executor.bundles, log=self._log)
        pruning = clean_environments(self._environments, lambda: self._executor.environments, log=self._log)
        logs = self._logs.run(), self._logs.run_late()
        return [self._apply_events_meanwhile(), *logs, cleaning, pruning, self._triggers.run()]

    async def tick(self) -> float:
        """Apply the events, then report ended attempts and claim as many tasks as there are free slots, in one round
        trip."""
        self._apply_events()
        self._launcher.start_delayed()
        now = boot_seconds()
        self._launcher.return_queued(before=inf if self._state.request else now - LONGEST_QUEUED_SECONDS)
        if not (self._is_exchange_due or self._state.has_ended) and now < self._poll_at:
            return self._poll_at - now
        # Set before the exchange: what happens while it waits makes another one due.
        self._is_exchange_due, self._poll_at = False, now + self._access.poll_seconds
        exchange = self._state.next_exchange(now)
        if exchange is None:
            self._exit_if_idle()
            return self._access.poll_seconds
        try:
            result = await report_outcomes(self._send, exchange.ended, exchange.free, log=self._log)
        except BaseException:
            self._is_exchange_due = True
            if self._state.exchange_failed(exchange, boot_seconds()):
                self.registration.heartbeat.beat_now()
            raise
        answer = result.answer
        if self._access.is_over_https:
            self._state.ahead = self._round_trips.note(len(exchange.ended), now, boot_seconds())
        self._note_answer(exchange, result)
        if answer.refused:
            await self._drop(answer.refused, exchange.ended)
        if answer.claims:
            await self._launcher.start(answer.claims, exchange.ended_at)
            if self._launcher.has_queued:
                asyncio.get_running_loop().call_later(LONGEST_QUEUED_SECONDS, self._wake.set)
        self._exit_if_idle()
        self._is_exchange_due = self._is_exchange_due or answer.is_walking
        return 0.0 if self._is_exchange_due or self._state.has_ended else self._access.poll_seconds

    async def _send(self, ended: list[Outcome], free: int) -> Exchange:
        reports = []
        for outcome in ended:
            policy, attempt = self._state.retry_terms(outcome)
            reports.append(Report(outcome=outcome, text=encode_report(outcome, policy=policy, attempt=attempt)))
        answer, server = await self._access.exchange(reports, free, self._may_claim_from)
        self._state.note_server(server)
        return answer

    def _may_claim_from(self, server: Server | None) -> bool:
        if self._state.may_claim_from(server):
            return True
        self.registration.heartbeat.beat_now()
        return False

    def _note_answer(self, exchange: NextExchange, result: ReportResult) -> None:
        now, answer = boot_seconds(), result.answer
        self._state.add_claims(answer.claims, now)
        metrics.CLAIMS.inc(len(answer.claims))
        self._logs.set_busy(self._state.active > 0)
        if any(waits_for_trigger(outcome) for outcome in exchange.ended):
            self._triggers.lease_soon()
        stored = [outcome for outcome in exchange.ended if outcome not in result.unstored]
        self._executor.settle([(outcome.key, outcome.epoch) for outcome in stored])
        log_finished(self._state.reported(stored, now), log=self._log)
        if result.unstored:
            asyncio.get_running_loop().call_later(REPORT_AGAIN_SECONDS, self._report_again, result.unstored)

    def _report_again(self, outcomes: list[Outcome]) -> None:
        self._state.put_back(outcomes)
        self._wake.set()

    async def _drop(self, refused: list[tuple[TaskKey, int]], ended: list[Outcome]) -> None:
        """These attempts were taken away: nothing of theirs is stored except, late, their log."""
        log_refused(refused, log=self._log)
        late = [last_lines(outcome) for outcome in ended if outcome.log and (outcome.key, outcome.epoch) in refused]
        store = self._access.open_logs()
        with suppress(psycopg.Error, EvertickError, OSError):
            await ship(store, session=self.session, chunks=late)
        await store.close()

    # Events

    async def _apply_events_meanwhile(self) -> None:
        """Apply events also while the loop waits for the database: a heartbeat's answer must not wait for an exchange
        that may never be answered."""
        while True:
            await self._events.has_arrived.wait()
            self._events.has_arrived.clear()
            try:
                self._apply_events()
            except Exception as error:
                # Whatever the error: it must not end everything that runs here.
                metrics.JOB_FAILURES.labels(job="runner").inc()
                self._log.error("loop_failed", loop="runner", error=error)
                self._events.has_arrived.set()

    def _apply_events(self) -> None:
        for event in self._events.take():
            match event:
                case Outcomes():
                    self._end_attempts(self._uploads.upload_first(self._triggers.take(event.outcomes)))
                case ResultStored():
                    self._end_attempts([event.outcome])
                case HeartbeatAnswered():
                    self._apply_heartbeat(event)
                case PeerDied():
                    self._is_exchange_due = True
                case NotificationArrived():
                    self._is_exchange_due = self._is_exchange_due or event.channel is Channel.TASKS
                case LaunchFailed():
                    # Its outcome waits in the state: the loop only has to be woken.
                    pass
                case _:
                    assert_never(event)

    def _end_attempts(self, outcomes: list[Outcome]) -> None:
        self._state.end_attempts(outcomes, boot_seconds())
        self._launcher.start_queued()
        self._logs.set_busy(self._state.active > 0)

    def _apply_heartbeat(self, event: HeartbeatAnswered) -> None:
        actions = self._state.on_heartbeat(
            event.reply, sent_at=event.sent_at, is_spare=event.is_spare, server=event.server
        )
        self._executor.extend_lease(actions.stop_at)
        if actions.is_declared_dead:
            self.registration.on_declared_dead(self._state.active)
        if event.reply.has_triggers or actions.is_new_request:
            self._triggers.lease_soon()
        if actions.is_new_request:
            self.registration.on_request()
            self._exit_if_idle()
        if actions.is_connection_suspect:
            self._access.abort()
        self._kill(actions.kill, "lease lost", 0.0)
        self._kill(actions.stop, "stop requested", CANCEL_GRACE_SECONDS)
        if actions.given_back:
            metrics.CLAIMS_LOST.inc(actions.given_back)
            self._log.warning("claim_reply_lost", attempts=actions.given_back)
        if actions.ask_again:
            asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self.registration.heartbeat.beat_now)
        self._is_exchange_due = self._is_exchange_due or actions.is_exchange_due

    def _kill(self, attempts: list[AttemptRef], reason: str, grace_seconds: float) -> None:
        for ref in attempts:
            if not self._launcher.withdraw(ref, reason):
                self._executor.kill(*ref, reason, grace_seconds=grace_seconds)

    def _on_available(self) -> None:
        """A trigger's event has made a task available."""
        self._is_exchange_due = True
        self._wake.set()

    def _exit_if_idle(self) -> None:
        if self._state.is_idle and self._triggers.is_idle:
            self.registration.on_idle()

    async def _bundle_place(self, bundle: str, file: str) -> BundlePlace:
        async def find() -> tuple[Path, bool]:
            return await unpacked(self._access, bundle, self._settings.bundles_folder)

        async with asyncio.timeout(FETCH_SECONDS):
            path, uses_threads = await keep_trying(find, stop=self.registration.over, name="bundles", log=self._log)
        if (interpreter := await self._airflow.interpreter(path / file)) is not None:
            zygote = self._airflow.zygote(interpreter)
            return BundlePlace(path, uses_threads, self._environment, interpreter, zygote)
        interpreter = await self._environments.of_bundle(path, log=self._log)
        return BundlePlace(path, uses_threads, self._environment, interpreter)

    async def _answer(self, order: AttemptOrder, verb: str, args: dict[str, Any]) -> object:
        """An attempt waits for its answer for as long as the database is unreachable."""
        holder = AttemptHolder(key=order.key, epoch=order.epoch, session=order.session)
        ask = partial(self._access.answer, holder, verb, args)
        return await keep_trying(ask, stop=self.registration.over, name="asks", log=self._log)

    # The end of the session

    async def _leave(self) -> None:
        """Let attempts finish within the grace period, stop the rest, report all outcomes, and deregister."""
        registration, state = self.registration, self._state
        state.is_stopping = True
        self._triggers.lease_soon()
        self._log.info("service_stopping", attempts=state.active, reason=registration.ending.value)
        is_over = asyncio.Event()

        async def stop_attempts() -> None:
            is_dead = registration.ending is Ending.DECLARED_DEAD
            await self._launcher.stop()
            await self._executor.stop_within(0.0 if is_dead else self._settings.stop_grace_seconds, registration.hurry)
            # Outcomes that the executor has just put into the queue, before their uploads are stopped.
            self._apply_events()
            await self._uploads.stop()
            is_over.set()
            self._wake.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(stop_attempts())
            await run_loop(self.tick, wake=self._wake, stop=is_over, name="runner", log=self._log)
        await registration.deregister(self._report_rest, unreported=lambda: state.unreported)

    async def _report_rest(self) -> None:
        self._apply_events()
        while self._state.has_ended:
            await self.tick()
        await self._triggers.stop()
