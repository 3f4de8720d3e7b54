"""The runner: claims what it can start now, drives the executor, and reports what ended.

One step is in flight at a time; whatever ends meanwhile is the next batch, so batches grow with the load and no timer
sits between tasks. Never starts what it has not claimed, and never claims more than it has slots for (K8, K11).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psycopg

from evertick.config import Settings
from evertick.domain.attempt import AttemptOrder, Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import EvertickError, PostgresUnavailable
from evertick.domain.retry import RetryPolicy
from evertick.engine.claim_cursor import ClaimCursor
from evertick.engine.extend import Extended, Held
from evertick.engine.step import Stepped, report, step
from evertick.execution.limits import ExecutorLimits
from evertick.execution.local import LocalExecutor
from evertick.execution.spool import LogCap, LogChunk
from evertick.execution.stock import BundlePlace
from evertick.services.events import Log
from evertick.services.heartbeat import Heartbeat
from evertick.services.link import Link, Waker, keep_listening
from evertick.services.loop import keep_trying, run_loop
from evertick.services.reporting import tell
from evertick.services.shipping import LogService, ship
from evertick.services.versions import Versions, order, unpacked
from evertick.services.whoami import new_runner
from evertick.store import runners
from evertick.store.db import Purpose
from evertick.store.runners import NewRunner
from evertick.store.tasks import StepRow
from evertick.store.wake import Channel

MOST_REPORTS = 500
TELL_AGAIN_SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.2
# A canceled body is gone within a second of the command (DESIGN, States); this is what it has to tidy up.
CANCEL_GRACE_SECONDS = 0.5


@dataclass(slots=True)
class _Attempt:
    """What the runner remembers of an attempt from its claim until its report is stored."""

    epoch: int
    attempt: int
    policy: RetryPolicy
    label: str
    started: float


class Runner:
    def __init__(self, settings: Settings, *, url: str, log: Log, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is what tasks can see of the environment; None is all of it."""
        self.session = secrets.randbits(63)
        self._settings, self._url, self._log, self._environment = settings, url, log, environment
        self._hot, self._side = Link(url, Purpose.HOT), Link(url, Purpose.PLANNING)
        self._waker = Waker(url, is_enabled=settings.notify)
        self._versions = Versions()
        self._cursor = ClaimCursor(len(settings.runner_queues))
        self._attempts: dict[TaskKey, _Attempt] = {}
        self._active = 0
        self._ended: list[Outcome] = []
        self._is_stepping = False
        self._is_leaving = False
        self._was_buried = False
        self.wake, self.stop = asyncio.Event(), asyncio.Event()
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
        self._logs = LogService(
            url, spool=settings.spool_folder, session=self.session, poll=self._executor.poll_logs, log=log
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
            background = [
                group.create_task(work) for work in (self._waker.run(), self._logs.run(), self._logs.run_late())
            ]
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
            told = await tell(self._send, ended, free, log=self._log)
        except BaseException:
            # The outcome of the commit is unknown; sending the same reports again is harmless.
            self._ended = ended + self._ended
            raise
        finally:
            self._is_stepping = False
        done = told.stepped
        # Before anything is awaited: a heartbeat that comes between must not take these for claims whose reply was lost.
        self._hold(done.claims)
        self._forget([outcome for outcome in ended if outcome not in told.unstored])
        if told.unstored:
            asyncio.get_running_loop().call_later(TELL_AGAIN_SECONDS, self._tell_again, told.unstored)
        if done.has_more:
            self._waker.wake(Channel.READY)
        if any(outcome.kind in _MAY_RETRY for outcome in ended):
            self._waker.wake(Channel.PLAN)
        if done.refused:
            await self._drop(done.refused, ended)
        if done.claims:
            await self._start(done.claims)
        return 0.0 if self._ended else self._settings.tick_seconds

    async def _send(self, ended: list[Outcome], free: int) -> Stepped:
        return await step(
            await self._hot.get(),
            session=self.session,
            reports=[self._report(outcome) for outcome in ended],
            queues=list(self._settings.runner_queues),
            free=free,
            infra_retries=self._settings.infra_retries,
            cursor=self._cursor,
        )

    def _tell_again(self, outcomes: list[Outcome]) -> None:
        self._ended += outcomes
        self.wake.set()

    async def _register(self) -> None:
        settings = self._settings
        settings.spool_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        runner = new_runner(self.session, settings.runner_id, settings.runner_queues, settings.runner_slots)
        await keep_trying(lambda: self._join(runner), stop=self.stop, name="register", log=self._log)
        self._log.info("started", runner=runner.runner_id, session=self.session, slots=runner.slots)

    async def _join(self, runner: NewRunner) -> None:
        await runners.register(await self._side.get(), runner)

    def _hold(self, claims: list[StepRow]) -> None:
        now = time.monotonic()
        for claim in claims:
            held = _Attempt(claim.epoch, claim.attempt, RetryPolicy(), f"task {claim.idx}", now)
            self._attempts[TaskKey(claim.run_id, claim.idx, claim.map_index)] = held
        self._active += len(claims)

    async def _start(self, claims: list[StepRow]) -> None:
        orders: list[AttemptOrder] = []
        trouble: Exception | None = None
        for claim in claims:
            key = TaskKey(claim.run_id, claim.idx, claim.map_index)
            held = self._attempts[key]
            try:
                version = self._versions.known(claim.version_id) or await self._versions.fetch(
                    await self._side.get(), claim.version_id
                )
                orders.append(order(claim, version, self.session))
                task = version.spec.tasks[claim.idx]
                held.policy, held.label = task.retry, f"{version.spec.name}.{task.name}"
            except (psycopg.Error, PostgresUnavailable, OSError) as error:
                # No fault of the task's: it goes back, and so that this does not go round and round, we pause.
                trouble = error
                self._ended_early(key, claim.epoch, OutcomeKind.GIVEN_BACK, error)
            except (EvertickError, IndexError, ValueError) as error:
                self._ended_early(key, claim.epoch, OutcomeKind.FAILED, error)
        self._executor.start_many(orders)
        self._logs.is_busy = True
        self._logs.wake.set()
        if trouble is not None:
            raise trouble

    def _ended_early(self, key: TaskKey, epoch: int, kind: OutcomeKind, error: Exception) -> None:
        self._active -= 1
        self._ended.append(Outcome(key=key, epoch=epoch, kind=kind, reason=f"{type(error).__name__}: {error}"))

    def _on_outcomes(self, outcomes: list[Outcome]) -> None:
        """The executor calls this on our loop when attempts have ended and their processes are gone."""
        for outcome in outcomes:
            held = self._attempts.get(outcome.key)
            if held is None or held.epoch != outcome.epoch:
                continue
            self._active -= 1
            self._ended.append(outcome)
        self.wake.set()
        self._logs.is_busy = self._active > 0
        if not self._active:
            self._logs.wake.set()

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
        # Given back once, however often a heartbeat asks before that is stored.
        known = {(outcome.key, outcome.epoch) for outcome in self._ended}
        unknown = [held for held in reply.unknown if held not in known and not self._holds(*held)]
        if unknown and self._is_stepping:
            # The reply that is on its way may carry them; ask again once it is here.
            asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self._heartbeat.beat_now)
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

    async def _place(self, bundle: str, file: str) -> BundlePlace:
        async def find() -> BundlePlace:
            path, uses_threads = await unpacked(await self._side.get(), bundle, self._settings.bundles_folder)
            return BundlePlace(path=path, uses_threads=uses_threads, environment=self._environment)

        return await keep_trying(find, stop=self.stop, name="bundles", log=self._log)

    async def _leave(self) -> None:
        """Let attempts end within the grace, stop the rest, report everything as it ends, and say goodbye."""
        self._is_leaving = True
        grace = 0.0 if self._was_buried else self._settings.stop_grace_seconds
        is_over = asyncio.Event()

        async def stop_attempts() -> None:
            await self._executor.stop(grace)
            is_over.set()
            self.wake.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(stop_attempts())
            await run_loop(self.tick, wake=self.wake, stop=is_over, name="runner", log=self._log)
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
