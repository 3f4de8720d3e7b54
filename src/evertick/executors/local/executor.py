"""The local executor: runs attempts in processes on this machine and reports how each ended. Does not use the database.

An outcome is reported once, and only when no process of the attempt's tree is left.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from evertick.attempts.protocol import OPEN_VERBS, Report, frame
from evertick.domain.attempt import AttemptOrder, Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import Conflict, EnvironmentFailed, EvertickError, UserError
from evertick.executors.local.attempt_logs import AttemptLogs
from evertick.executors.local.bundle_executor import BundleExecutor
from evertick.executors.local.child_process import Attempt, ChildProcess, ExecutorLimits
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.logs import format
from evertick.logs.spool import LogChunk, SpoolFolder, remove_files, session_folder
from evertick.processes.tree import OomEvidence, explain_exit, oom_counters

_TICK_SECONDS = 0.25
_LONGEST_CLOSE_SECONDS = 3.0
_STOPPED = "the runner stopped before the attempt ended"

Name = tuple[TaskKey, int]
# Answers a question of an attempt. An EvertickError is passed on to it.
Answer = Callable[[AttemptOrder, str, dict[str, Any]], Awaitable[object]]
Address = tuple[str, str]


class LocalExecutor:
    """`async with LocalExecutor(...) as executor:`; leaving the block kills all running attempts. `put` receives
    outcomes, each once."""

    def __init__(
        self,
        *,
        slots: int,
        spool_dir: Path,
        session: int,
        resolve_bundle: Callable[[str, str], Awaitable[BundlePlace]],
        put: Callable[[list[Outcome]], None],
        answer: Answer | None = None,
        limits: ExecutorLimits | None = None,
        stop_reason: str = _STOPPED,
    ) -> None:
        self._stop_reason = stop_reason
        self._slots, self.session = slots, session
        self.spool = SpoolFolder(session_folder(spool_dir, session))
        self._resolve_bundle, self._answer = resolve_bundle, answer
        self._put = put
        chosen = limits or ExecutorLimits()
        self._limits = replace(chosen, max_idle=max(chosen.min_idle, min(chosen.max_idle, slots)))
        self._attempts: dict[Name, Attempt] = {}
        # Of these; they need no slot.
        self._trigger_count = 0
        self._executors: dict[Address, BundleExecutor] = {}
        self._retired: list[BundleExecutor] = []
        self._fetching: dict[Address, list[Attempt]] = {}
        self._fetches: list[asyncio.Task[None]] = []
        self._outcomes: list[Outcome] = []
        self._shipping = AttemptLogs(self.spool, self._limits)
        self._oom = OomEvidence(oom_counters())
        self._is_stopping = False
        self._is_empty = asyncio.Event()
        self.contact_until = math.inf

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._ticking = self._loop.call_later(_TICK_SECONDS, self._tick)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(grace_seconds=0)
        await self._group.__aexit__(None, None, None)

    @property
    def free_slots(self) -> int:
        return self._slots - len(self._attempts) + self._trigger_count

    def held(self) -> list[Name]:
        """Every attempt that was started and has no outcome yet."""
        return list(self._attempts)

    @property
    def bundles(self) -> set[str]:
        """The bundles whose code it may use at any moment, without looking it up again."""
        return {bundle for bundle, _ in (*self._executors, *self._fetching)}

    @property
    def environments(self) -> set[str]:
        """The names of the environments that it may use at any moment."""
        places = (bundle.place.interpreter.environment for bundle in self._executors.values())
        return {Path(place).name for place in places if place}

    def start_many(self, orders: list[AttemptOrder]) -> None:
        """Start these now. More orders than free slots is a caller's error, and none is started."""
        if self._is_stopping:
            raise Conflict("the executor is stopping and starts no more attempts")
        triggers = sum(order.is_trigger for order in orders)
        if len(orders) - triggers > self.free_slots:
            free = f"{self.free_slots} of {self._slots} slots are free"
            raise Conflict(f"cannot start {len(orders)} attempts: {free}; claim no more than there are free slots")
        if any((order.key, order.epoch) in self._attempts for order in orders):
            raise Conflict("an attempt that is running here cannot be started again")
        by_address: dict[Address, list[Attempt]] = {}
        for order in orders:
            self._attempts[order.key, order.epoch] = attempt = Attempt(order, self._loop.time())
            by_address.setdefault((order.bundle, order.file), []).append(attempt)
        self._trigger_count += triggers
        for address, attempts in by_address.items():
            bundle = self._executors.get(address)
            if bundle is not None and bundle.is_idle and not bundle.place.interpreter.exists:
                self._retire(address)
                bundle = None
            if bundle is not None:
                bundle.start(attempts)
            elif (waiting := self._fetching.get(address)) is not None:
                waiting += attempts
            else:
                self._fetching[address] = attempts
                self._fetches.append(self._group.create_task(self._fetch_bundle(address)))

    def kill(self, key: TaskKey, epoch: int, reason: str, grace_seconds: float = 0.0) -> None:
        """Kill an attempt and its whole process tree, which its outcome then confirms. A grace period first asks it to
        stop; a task may have a longer one of its own."""
        if (attempt := self._attempts.get((key, epoch))) is not None:
            if grace_seconds and attempt.order.stop_grace_seconds is not None:
                grace_seconds = attempt.order.stop_grace_seconds
            self._stop_attempt(attempt, OutcomeKind.KILLED, reason, grace_seconds)

    def extend_lease(self, until: float) -> None:
        """Until then, in seconds since boot, these attempts cannot be given to another runner: attempts that must not
        overlap with a successor are stopped at that time by their fork server, unless this is called again before."""
        self.contact_until = until
        for bundle in (*self._executors.values(), *self._retired):
            bundle.extend_lease(until)

    def poll_logs(self) -> list[LogChunk]:
        """New lines of running attempts, and lines that did not fit into an outcome. Call it every 200 ms.

        Calling it again confirms that the previous chunks are stored; until then they stay in the spool.
        """
        return self._shipping.poll(self._attempts.values(), self._loop.time())

    def settle(self, ended: Iterable[Name]) -> None:
        """The outcomes of these attempts are stored: the spool may delete their last lines."""
        self._shipping.settle(ended)

    async def stop(self, grace_seconds: float) -> None:
        """Return orders that have not started, let the rest end within the grace period, kill the others; leave no
        process."""
        self._is_stopping = True
        for task in self._fetches:
            task.cancel()
        for attempt in list(self._withdrawn()):
            self.on_lost(attempt, OutcomeKind.GIVEN_BACK, self._stop_reason)
        for attempt in [each for each in self._attempts.values() if each.order.is_trigger]:
            self._stop_attempt(attempt, OutcomeKind.GIVEN_BACK, self._stop_reason, 0)
        await self._wait_until_empty(grace_seconds)
        for attempt in list(self._attempts.values()):
            self._stop_attempt(attempt, OutcomeKind.GIVEN_BACK, self._stop_reason, 0)
        await self._wait_until_empty(3 * self._limits.kill_confirm_seconds)
        self._ticking.cancel()
        await self._close_executors()
        self._deliver()
        await asyncio.to_thread(remove_files, self.spool.take_stored())

    async def stop_within(self, grace_seconds: float, hurry: asyncio.Event) -> None:
        """`stop`, but without the rest of the grace period once `hurry` is set."""
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(self.stop(grace_seconds))
            hurrying = group.create_task(hurry.wait())
            await asyncio.wait((stopping, hurrying), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                await self.stop(0.0)
            await stopping
            hurrying.cancel()

    # What happens to attempts, called by their bundle's executor.

    def on_started(self, attempt: Attempt) -> None:
        attempt.started_at = self._loop.time()
        if (limit := attempt.order.timeout_seconds) is not None:
            reason = f"execution_timeout: exceeded {limit:g} s"
            grace = attempt.order.stop_grace_seconds or 0
            verdict = OutcomeKind.TIMED_OUT
            attempt.timer = self._loop.call_later(limit, self._stop_attempt, attempt, verdict, reason, grace)

    def on_ask(self, attempt: Attempt, link: ChildProcess, verb: str, args: dict[str, Any], *ask_id: int) -> None:
        self._fetches.append(self._group.create_task(self._reply(attempt, link, verb, args, *ask_id)))

    async def _reply(self, attempt: Attempt, link: ChildProcess, verb: str, args: dict[str, Any], *ask_id: int) -> None:
        """The process waits for exactly one answer to each question. One that runs triggers asks several at a time."""
        code: str | None = None
        value: object = None
        try:
            if self._answer is None:
                raise UserError(f"tasks of an agent have no state and no steps, and cannot ask for {verb!r}")
            if not attempt.order.asks and verb not in OPEN_VERBS:
                raise UserError(f"the task does not declare that it asks for {verb!r}; write @task(asks=True)")
            value = await self._answer(attempt.order, verb, args)
        except EvertickError as error:
            code, value = error.code, str(error)
        except Exception as error:
            code, value = "internal_error", f"{type(error).__name__}: {error}"
        if attempt.number in link.running:
            link.send(frame(("answer", code, value, *ask_id)))

    def on_died(self, attempt: Attempt, wait_status: int) -> None:
        """The process ended without a report. A shell also ends this way."""
        is_shell = attempt.order.command is not None
        report = Report(attempt.number, OutcomeKind.SUCCESS, exit_code=0, log_end=None)
        if attempt.link is not None:
            report = report._replace(usage=attempt.link.usage_of_only_attempt())
        if is_shell and wait_status == 0:
            self.on_ended(attempt, report)
            return
        reason, code = explain_exit(wait_status, has_oom_evidence=self._oom.has_new(), is_shell=is_shell)
        if attempt.order.is_trigger:
            self.on_lost(attempt, OutcomeKind.LOST, reason)
            return
        if code >= 0 and not is_shell:
            reason += " before the task returned"
        self.on_ended(attempt, report._replace(kind=OutcomeKind.FAILED, reason=reason, exit_code=code))

    def on_lost(
        self,
        attempt: Attempt,
        kind: OutcomeKind,
        reason: str,
        log_text: str = "",
        *,
        retry_after_seconds: float | None = None,
    ) -> None:
        """It never started, or ended through no fault of its own."""
        spooled = format.framed(time.time_ns() // 1000, "ERROR", log_text) if log_text else b""
        report = Report(attempt.number, kind, reason, retry_after_seconds=retry_after_seconds, log_end=None)
        self.on_ended(attempt, report, format.shipped(spooled, 0))

    def on_ended(self, attempt: Attempt, report: Report, note: bytes = b"") -> None:
        order = attempt.order
        if self._attempts.pop((order.key, order.epoch), None) is None:
            return
        self._trigger_count -= order.is_trigger
        if attempt.timer is not None:
            attempt.timer.cancel()
        if attempt.verdict is not None:
            trouble, end = report.log_trouble, report.log_end
            report = Report(attempt.number, *attempt.verdict, log_end=end, log_trouble=trouble, usage=report.usage)
        last = self._shipping.ended(attempt, report.log_end, report.log_trouble)
        if not self._outcomes:
            self._loop.call_soon(self._deliver)
        self._outcomes.append(
            Outcome(
                key=order.key,
                epoch=order.epoch,
                kind=report.kind,
                reason=report.reason,
                result_json=report.result_json,
                exit_code=report.exit_code,
                no_retry=report.no_retry,
                retry_after_seconds=report.retry_after_seconds,
                skip_names=tuple(report.skips),
                start_seconds=attempt.told_start_seconds(),
                usage=report.usage,
                log=last.content + note,
                log_offset=last.offset,
                log_end=last.end,
            )
        )
        if not self._attempts:
            self._is_empty.set()

    def _deliver(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        if outcomes:
            self._put(outcomes)

    def _stop_attempt(self, attempt: Attempt, kind: OutcomeKind, reason: str, grace_seconds: float) -> None:
        """The first verdict stands; a later one can only shorten the grace period."""
        if attempt.verdict is not None and grace_seconds > 0:
            return
        attempt.verdict = attempt.verdict or (kind, reason)
        if attempt.timer is not None:
            attempt.timer.cancel()
        address = attempt.order.bundle, attempt.order.file
        if attempt in self._fetching.get(address, ()):
            self._fetching[address].remove(attempt)
            self.on_lost(attempt, kind, reason)
        elif (bundle := self._executors.get(address)) is not None:
            bundle.stop(attempt, grace_seconds)

    async def _fetch_bundle(self, address: Address) -> None:
        """Find the bundle's code and start the attempts that wait for it."""
        try:
            place = await self._resolve_bundle(*address)
        except EnvironmentFailed as error:
            # Not the task's fault: it runs again later, here or elsewhere, without using one of its retries. Only a
            # failure that lasts ends it.
            kind = OutcomeKind.LOST if error.is_lasting else OutcomeKind.GIVEN_BACK
            pause = error.retry_after_seconds
            reason = f"environment_failed: its Python environment cannot be built on this machine: {error}"
            for attempt in self._fetching.pop(address):
                self.on_lost(attempt, kind, reason, retry_after_seconds=pause)
            return
        except Exception as error:
            why = str(error) or type(error).__name__
            # Code that does not exist is the version's fault; code that cannot be reached is not the task's.
            kind = OutcomeKind.FAILED if isinstance(error, EvertickError) else OutcomeKind.GIVEN_BACK
            for attempt in self._fetching.pop(address):
                self.on_lost(attempt, kind, f"bundle {address[0]} could not be fetched: {why}")
            return
        self._make_room()
        self._executors[address] = bundle = BundleExecutor(self, place, address[1], self.spool, self._limits)
        bundle.contact_until = self.contact_until
        bundle.start(self._fetching.pop(address))

    def _make_room(self) -> None:
        """Fork servers are limited: end the least recently used one, unless it is busy."""
        excess = len(self._executors) + 1 - self._limits.max_parents
        idle = sorted((bundle.last_used_at, address) for address, bundle in self._executors.items() if bundle.is_idle)
        for _, address in idle[: max(0, excess)]:
            self._retire(address)

    def _retire(self, address: Address) -> None:
        bundle = self._executors.pop(address)
        self._retired.append(bundle)
        bundle.pool.close()

    def _tick(self) -> None:
        now = self._loop.time()
        self._ticking = self._loop.call_later(_TICK_SECONDS, self._tick)
        self._shipping.trim(self._attempts.values())
        for bundle in self._executors.values():
            bundle.tick(now)
        if stored := self.spool.take_stored():
            self._loop.run_in_executor(None, remove_files, stored)
        self._retired = [bundle for bundle in self._retired if not bundle.pool.all_gone.is_set()]
        self._fetches = [task for task in self._fetches if not task.done()]

    def _withdrawn(self) -> Iterable[Attempt]:
        for attempts in self._fetching.values():
            yield from attempts
            attempts.clear()
        for bundle in self._executors.values():
            yield from bundle.withdraw()

    async def _wait_until_empty(self, seconds: float) -> None:
        self._is_empty.clear()
        if self._attempts and seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._is_empty.wait()

    async def _close_executors(self) -> None:
        self._retired += self._executors.values()
        self._executors.clear()
        for bundle in self._retired:
            bundle.pool.close()
        try:
            async with asyncio.timeout(_LONGEST_CLOSE_SECONDS):
                for bundle in self._retired:
                    await bundle.pool.all_gone.wait()
        except TimeoutError:
            for bundle in self._retired:
                bundle.pool.destroy()
