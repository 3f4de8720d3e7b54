"""The runner: claims what it can start now, drives the executor, and reports what ended.

One step is in flight at a time; whatever ends meanwhile is the next batch, so batches grow with the load and no timer
sits between tasks. Never starts what it has not claimed, and never claims more than it has slots for (K8, K11).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psycopg

from evertick.config import Settings
from evertick.domain.attempt import AttemptOrder, Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import EvertickError, PostgresUnavailable
from evertick.domain.retry import RetryPolicy
from evertick.engine.extend import Extended, Held
from evertick.engine.step import Stepped, report, step
from evertick.execution.limits import ExecutorLimits
from evertick.execution.local import LocalExecutor
from evertick.execution.spool import LogCap, LogChunk
from evertick.execution.stock import BundlePlace
from evertick.services.events import Log
from evertick.services.heartbeat import Heartbeat
from evertick.services.link import Link, Waker, keep_listening
from evertick.services.loop import back_off, run_loop
from evertick.services.shipping import ship, ship_leftovers
from evertick.services.versions import Versions, order, unpacked
from evertick.services.whoami import new_runner
from evertick.store import runners
from evertick.store.db import Purpose
from evertick.store.tasks import StepRow
from evertick.store.wake import Channel

MOST_REPORTS = 500
LOG_SECONDS = 0.2
IDLE_SECONDS = 60.0
CANCEL_GRACE_SECONDS = 5.0


@dataclass(slots=True)
class _Attempt:
    """What the runner remembers of an attempt from its claim until its report is stored."""

    epoch: int
    attempt: int
    policy: RetryPolicy
    label: str
    started: float


class Runner:
    def __init__(self, settings: Settings, *, url: str, log: Log) -> None:
        self.session = secrets.randbits(63)
        self._settings, self._url, self._log = settings, url, log
        self._hot, self._side = Link(url, Purpose.HOT), Link(url, Purpose.PLANNING)
        self._waker = Waker(url, is_enabled=settings.notify)
        self._versions = Versions()
        self._attempts: dict[TaskKey, _Attempt] = {}
        self._active = 0
        self._ended: list[Outcome] = []
        self._is_stepping = False
        self._is_leaving = False
        self._was_buried = False
        self.wake, self.stop = asyncio.Event(), asyncio.Event()
        self._log_wake = asyncio.Event()
        self._executor = LocalExecutor(
            slots=settings.runner_slots,
            spool_dir=settings.spool_folder,
            session=self.session,
            resolve_bundle=self._place,
            on_outcomes=self._on_outcomes,
            limits=ExecutorLimits(
                log_cap=LogCap(head_bytes=settings.log_head_bytes, tail_bytes=settings.log_tail_bytes)
            ),
        )

    async def run(self) -> None:
        """Until `stop` is set; then what runs may finish within the grace, and the rest is given back."""
        loop = asyncio.get_running_loop()
        await self._register()
        heartbeat = Heartbeat(
            url=self._url,
            session=self.session,
            seconds=self._settings.heartbeat_seconds,
            held=self._held,
            on_reply=lambda reply: _hand_over(loop, self._on_extended, reply),
            log=self._log,
        )
        heartbeat.start()
        self._heartbeat = heartbeat
        async with self._executor, asyncio.TaskGroup() as group:
            background = [group.create_task(self._waker.run()), group.create_task(self._run_logs())]
            if self._settings.notify:
                channels = [Channel.READY, Channel.STOP]
                background.append(group.create_task(keep_listening(self._url, channels, self._on_wake, log=self._log)))
            await run_loop(self.tick, wake=self.wake, stop=self.stop, name="runner", log=self._log)
            await self._leave()
            for task in background:
                task.cancel()
        heartbeat.stop()
        for link in (self._hot, self._side):
            await link.close()
        await self._waker.close()

    async def tick(self) -> float:
        """Report what ended and claim as much as there are free slots, in one round trip."""
        free = 0 if self._is_leaving else self._settings.runner_slots - self._active
        ended, self._ended = self._ended[:MOST_REPORTS], self._ended[MOST_REPORTS:]
        if not ended and free <= 0:
            return self._settings.tick_seconds
        self._is_stepping = True
        try:
            done = await self._step(ended, free)
        except BaseException:
            # The outcome of the commit is unknown; sending the same reports again is harmless.
            self._ended = ended + self._ended
            raise
        finally:
            self._is_stepping = False
        self._forget(ended)
        if done.claims:
            await self._start(done.claims)
        if done.has_more:
            self._waker.wake(Channel.READY)
        if done.refused:
            await self._drop(done.refused, ended)
        if any(outcome.kind in _MAY_RETRY for outcome in ended):
            self._waker.wake(Channel.PLAN)
        return 0.0 if self._ended else self._settings.tick_seconds

    async def _step(self, ended: list[Outcome], free: int) -> Stepped:
        """One round trip. If the database refuses a report, the others must not wait for it: halve until it is alone."""
        try:
            return await step(
                await self._hot.get(),
                session=self.session,
                reports=[self._report(outcome) for outcome in ended],
                queues=list(self._settings.runner_queues),
                free=free,
                infra_retries=self._settings.infra_retries,
            )
        except psycopg.Error as error:
            if not ended or isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
                raise
            self._log.error("report_refused", reports=len(ended), error=error)
            if len(ended) == 1:
                reason = f"its outcome could not be stored: {error}".splitlines()[0]
                plain = Outcome(key=ended[0].key, epoch=ended[0].epoch, kind=OutcomeKind.FAILED, reason=reason)
                if ended == [plain]:
                    raise
                return await self._step([plain], free)
        middle = len(ended) // 2
        first, second = await self._step(ended[:middle], 0), await self._step(ended[middle:], free)
        return Stepped(
            claims=second.claims,
            refused=first.refused + second.refused,
            has_more=first.has_more or second.has_more,
        )

    async def _register(self) -> None:
        settings = self._settings
        settings.spool_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        runner = new_runner(self.session, settings.runner_id, settings.runner_queues, settings.runner_slots)
        conn = await self._side.get()
        await runners.register(conn, runner)
        await ship_leftovers(conn, spool=settings.spool_folder, session=self.session, log=self._log)
        self._log.info("started", runner=runner.runner_id, session=self.session, slots=runner.slots)

    async def _start(self, claims: list[StepRow]) -> None:
        now = time.monotonic()
        orders: list[AttemptOrder] = []
        for claim in claims:
            key = TaskKey(claim.run_id, claim.idx, claim.map_index)
            held = _Attempt(claim.epoch, claim.attempt, RetryPolicy(), f"task {claim.idx}", now)
            self._attempts[key] = held
            self._active += 1
            try:
                version = self._versions.known(claim.version_id) or await self._versions.fetch(
                    await self._side.get(), claim.version_id
                )
                orders.append(order(claim, version, self.session))
                task = version.spec.tasks[claim.idx]
                held.policy, held.label = task.retry, f"{version.spec.name}.{task.name}"
            except (EvertickError, IndexError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
                self._on_outcomes([Outcome(key=key, epoch=claim.epoch, kind=OutcomeKind.FAILED, reason=reason)])
        self._executor.start_many(orders)
        self._log_wake.set()

    def _on_outcomes(self, outcomes: list[Outcome]) -> None:
        """The executor calls this on our loop when attempts have ended and their processes are gone."""
        for outcome in outcomes:
            held = self._attempts.get(outcome.key)
            if held is None or held.epoch != outcome.epoch:
                continue
            self._active -= 1
            self._ended.append(outcome)
        self.wake.set()
        if not self._active:
            self._log_wake.set()

    def _report(self, outcome: Outcome) -> str:
        held = self._attempts.get(outcome.key)
        policy, attempt = (held.policy, held.attempt) if held else (RetryPolicy(), 1)
        return report(outcome, policy=policy, attempt=attempt)

    def _forget(self, ended: list[Outcome]) -> None:
        """Their reports are stored."""
        now = time.monotonic()
        self._executor.settle([(outcome.key, outcome.epoch) for outcome in ended])
        for outcome in ended:
            held = self._attempts.get(outcome.key)
            if held is None or held.epoch != outcome.epoch:
                continue
            del self._attempts[outcome.key]
            if len(ended) <= _MOST_LINES:
                seconds = round(now - held.started, 3)
                run = outcome.key.run_id
                self._log.info("finish", task=held.label, run=run, outcome=outcome.kind.value, seconds=seconds)
        if len(ended) > _MOST_LINES:
            self._log.info("finish", attempts=len(ended))

    async def _drop(self, refused: list[Held], ended: list[Outcome]) -> None:
        """Those attempts were taken away from us: nothing of theirs was stored but, late, their log."""
        for key, epoch in refused:
            self._log.warning("lease_lost", run=key.run_id, task=key.idx, epoch=epoch)
        late = [
            LogChunk(key=o.key, epoch=o.epoch, offset=o.log_offset, end=o.log_end, content=o.log)
            for o in ended
            if o.log and (o.key, o.epoch) in refused
        ]
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            await ship(await self._side.get(), session=self.session, chunks=late)

    def _held(self) -> list[Held]:
        return [(key, held.epoch) for key, held in list(self._attempts.items())]

    def _on_extended(self, reply: Extended) -> None:
        if reply.is_gone and not self._was_buried:
            self._was_buried = True
            self._log.error("buried", session=self.session)
            self.stop.set()
            self.wake.set()
        for key, epoch in reply.lost:
            if self._holds(key, epoch):
                self._executor.kill(key, epoch, "lease lost", grace_seconds=0.0)
        for key, epoch in reply.stop:
            if self._holds(key, epoch):
                self._executor.kill(key, epoch, "stop requested", grace_seconds=CANCEL_GRACE_SECONDS)
        unknown = [(key, epoch) for key, epoch in reply.unknown if not self._holds(key, epoch)]
        if unknown and self._is_stepping:
            # The reply that is on its way may carry them; ask again once it is here.
            asyncio.get_running_loop().call_later(LOG_SECONDS, self._heartbeat.beat_now)
        elif unknown:
            self._log.warning("claim_reply_lost", attempts=len(unknown))
            back = OutcomeKind.GIVEN_BACK
            self._ended += [Outcome(key=k, epoch=e, kind=back, reason="claim_reply_lost") for k, e in unknown]
            self.wake.set()

    def _holds(self, key: TaskKey, epoch: int) -> bool:
        held = self._attempts.get(key)
        return held is not None and held.epoch == epoch

    def _on_wake(self, channel: Channel) -> None:
        if channel is Channel.STOP:
            self._heartbeat.beat_now()
        else:
            self.wake.set()

    async def _run_logs(self) -> None:
        link = Link(self._url, Purpose.PLANNING)
        unsent: list[LogChunk] = []

        async def ship_new() -> float:
            # Polling again tells the executor that the last chunks are stored, so they go first.
            if not unsent:
                unsent.extend(self._executor.poll_logs())
            if not unsent:
                return LOG_SECONDS if self._active else IDLE_SECONDS
            await ship(await link.get(), session=self.session, chunks=unsent)
            unsent.clear()
            return LOG_SECONDS

        try:
            await run_loop(ship_new, wake=self._log_wake, stop=asyncio.Event(), name="logs", log=self._log)
        finally:
            await link.close()

    async def _place(self, bundle: str, file: str) -> BundlePlace:
        failures = 0
        while True:
            try:
                path, uses_threads = await unpacked(await self._side.get(), bundle, self._settings.bundles_folder)
                return BundlePlace(path=path, uses_threads=uses_threads)
            except (psycopg.OperationalError, psycopg.InterfaceError, PostgresUnavailable) as error:
                failures += 1
                self._log.warning("unreachable", loop="bundles", error=error)
                await asyncio.sleep(back_off(failures))

    async def _leave(self) -> None:
        """Let attempts end within the grace, stop the rest, report everything, and say goodbye."""
        self._is_leaving = True
        grace = 0.0 if self._was_buried else self._settings.stop_grace_seconds
        await self._executor.stop(grace)
        try:
            async with asyncio.timeout(5):
                while self._ended:
                    await self.tick()
                await runners.leave(await self._side.get(), self.session)
        except (TimeoutError, psycopg.Error, PostgresUnavailable, OSError) as error:
            self._log.warning("left_without_goodbye", error=error, unreported=len(self._ended))
        self._log.info("stopped", session=self.session)


def _hand_over(loop: asyncio.AbstractEventLoop, on_reply: Callable[[Extended], None], reply: Extended) -> None:
    """From the heartbeat's thread to the runner's loop, which may be gone by then."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(on_reply, reply)


_MAY_RETRY = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.KILLED)
_MOST_LINES = 8
