"""The agent: runs one attempt on a remote machine and reports it to the API over HTTP. It has no access to the
database.

Never starts user code before the API acknowledges the start. Never reports an outcome before it is written to disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from math import inf
from pathlib import Path
from typing import TypeVar

from evertick.agent.api_client import ANSWER_SECONDS, AgentClient, keep_asking
from evertick.bundles.bundle import unpack
from evertick.bundles.cache import keep
from evertick.bundles.environments import Environments
from evertick.config import Settings
from evertick.domain.agent_protocol import AgentOrder, parse, refusal_to_bytes, to_bytes
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.errors import ApiUnreachable, Conflict, EvertickError, LeaseLost, Unauthenticated
from evertick.executors.local.child_process import ExecutorLimits
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.logs.spool import LogCap, LogChunk
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.processes.usage import container_peak_bytes
from evertick.runner.state import RunnerState
from evertick.runtime.http_client import read_token
from evertick.storage.result_files import ResultFiles, files_in

_UNSENT = "result_lost: the result is too large for the agent's outcome file, and did not reach the API"


def leave_refusal(path: Path | None, why: str) -> None:
    """Record why an agent never started, for the runner that started it: the agent's own output disappears with its
    container."""
    # An agent that cannot write here has already logged the reason. And an outcome that is there already takes
    # precedence.
    with suppress(OSError):
        if path is not None and not (path.exists() and path.stat().st_size):
            _write(path, refusal_to_bytes(why))


def _write(path: Path, raw: bytes) -> None:
    """Write in place: a pod's termination message is a mounted file that cannot be replaced. Half of a document counts
    as none."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as file:
        file.write(raw)
        with suppress(OSError):
            os.fsync(fd)


# A process manager that stops the agent kills it soon after: this is the time left to report the outcome.
LAST_WORDS_SECONDS = 10.0


# An attempt that has ended waits this long for its last lines before its outcome is reported.
LAST_LINES_SECONDS = 10.0


T = TypeVar("T")


# A canceled body must be gone soon after the command; this is its time to clean up.
CANCEL_GRACE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
# An API process that shuts down answers all waiting requests at once; do not repeat them in a tight loop.
SHORTEST_REST_SECONDS = 0.2


_STOPPED = "the agent was stopped before the attempt began"
# In a pod, nothing else sends an agent SIGTERM.
_STOPPED_EARLY = "its pod was deleted or evicted, or its agent was stopped otherwise, before the attempt ended"


class AgentExit(IntEnum):
    """How the agent's process ended: its exit code, the first thing that its executor sees."""

    DONE = 0
    FAILED = 1
    STOPPED = 3
    UNREPORTED = 4
    NOT_OURS = 5


class AgentSession:
    def __init__(
        self,
        settings: Settings,
        told: AgentOrder,
        *,
        line: AgentClient,
        heard_at: float,
        log: Log,
        environment: Mapping[str, str] | None,
    ) -> None:
        """`heard_at`: when the acknowledged start request was sent, in seconds since boot."""
        self._settings, self._line, self._environment = settings, line, environment
        self._order, self._uses_threads, limits = told.order, told.uses_threads, told.limits
        order = self._order
        self._log = log.bind(run=order.key.run_id, task=f"{order.dag}.{order.task}", epoch=order.epoch)
        self._grace_seconds, self._beat_seconds = limits.stop_grace_seconds, limits.heartbeat_seconds
        # The attempt must not be declared lost before its runner can read the outcome: the API's threshold counts.
        self._report_seconds = min(settings.agent_report_seconds, limits.lost_after_seconds / 2)
        self._files = ResultFiles(
            folder=str(settings.result_place.absolute()),
            spill_bytes=limits.result_spill_bytes,
            max_bytes=limits.result_max_bytes,
        )
        cap = LogCap(head_bytes=limits.log_head_bytes, tail_bytes=limits.log_tail_bytes)
        self._executor = LocalExecutor(
            slots=1,
            spool_dir=settings.spool_folder,
            session=order.session,
            resolve_bundle=self._place,
            put=self._put_outcomes,
            # There is one attempt: no process is kept ready for a second.
            limits=ExecutorLimits(log_cap=cap, results=self._files, min_idle=1, max_idle=1),
            stop_reason=_STOPPED_EARLY,
        )
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # Set when the outcome can no longer be reported to the API.
        self._give_up = asyncio.Event()
        self._state = RunnerState(slots=1, lost_after_seconds=limits.lost_after_seconds, now=heard_at)
        self._executor.extend_lease(self._state.stop_at)
        line.answer_seconds = min(ANSWER_SECONDS, max(1.0, limits.lost_after_seconds / 10))
        self._lines = AgentLog(line, self._executor, log=self._log)
        self._is_lost = False

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> AgentExit:
        self._log.info("attempt_started", session=f"{self._order.session:016x}", attempt=self._order.attempt)
        async with self._executor, asyncio.TaskGroup() as group:
            works = (self._beat(), self._lines.run(), self._stop_when_asked(stop, hurry))
            background = [group.create_task(work) for work in works]
            await self._begin()
            outcome = await self._ended
            code = await self._tell(outcome)
            for task in background:
                task.cancel()
        return code

    async def _begin(self) -> None:
        try:
            await self._fetch_inputs()
            self._executor.start_many([self._order])
        except (Conflict, ApiUnreachable):
            # The agent is already stopping.
            self._end(OutcomeKind.GIVEN_BACK, _STOPPED)
        except EvertickError as error:
            self._end(OutcomeKind.FAILED, f"{type(error).__name__}: {error}")
        except OSError as error:
            # A full disk, for example: not the task's fault, and another machine may have room.
            self._end(OutcomeKind.LOST, f"its large inputs could not be stored on the agent's machine: {error}")

    async def _fetch_inputs(self) -> None:
        """Download the large results of upstream tasks: they are files at the API, and must be files here."""
        wanted = await asyncio.to_thread(lambda: files_in(json.loads(self._order.inputs_json)))
        run_id = self._order.key.run_id
        for digest, size in wanted.items():
            with suppress(EvertickError):
                await asyncio.to_thread(self._files.get, run_id, digest, size)
                continue
            raw = await self._ask_for(f"/results/{digest}")
            await asyncio.to_thread(self._files.put, run_id, raw.decode("utf-8", "replace"))

    async def _place(self, bundle: str, file: str) -> BundlePlace:
        """The bundle, by its hash: from the local cache, or downloaded and verified."""
        folder = self._settings.bundles_folder
        if not await asyncio.to_thread(keep, folder / bundle):
            try:
                archive = await self._ask_for(f"/bundles/{bundle}")
            except (ApiUnreachable, LeaseLost) as error:
                # Not the code's fault: the attempt is returned to the queue.
                raise OSError(str(error)) from None
            await asyncio.to_thread(unpack, archive, bundle, folder)
        environments = Environments(self._settings, self._environment)
        interpreter = await environments.of_bundle(folder / bundle, log=self._log)
        return BundlePlace(folder / bundle, self._uses_threads, self._environment, interpreter)

    async def _ask_for(self, path: str) -> bytes:
        return await self._patiently(lambda: self._line.fetch(path), what=path.split("/")[1])

    def _put_outcomes(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if not self._ended.done():
                self._ended.set_result(outcome)

    def _end(self, kind: OutcomeKind, reason: str) -> None:
        order = self._order
        self._put_outcomes([Outcome(key=order.key, epoch=order.epoch, kind=kind, reason=reason)])

    async def _beat(self) -> None:
        """Extend the lease over HTTP, and long-poll for a request to stop, until the attempt is lost or canceled."""
        key, epoch, failures = self._order.key, self._order.epoch, 0
        while True:
            sent_at = boot_seconds()
            try:
                word, rest_seconds = await self._line.heartbeat(self._beat_seconds)
            except (LeaseLost, Conflict):
                word, rest_seconds = "lost", 0.0
            except EvertickError as error:
                # The API may come back. Until then the attempt continues, unless its fork server has a lease deadline.
                failures += 1
                self._log.warning("heartbeat_failed", failures=failures, error=error)
                pause = min(LONGEST_PAUSE_SECONDS, self._beat_seconds, 0.1 * 2 ** min(failures, 10))
                await asyncio.sleep(pause * (0.5 + random.random() / 2))
                continue
            if failures:
                self._log.info("heartbeat_recovered", after_failures=failures)
            failures = 0
            if word == "lost":
                self._lose()
                return
            if word == "stop":
                self._executor.kill(key, epoch, "stop requested", CANCEL_GRACE_SECONDS)
            self._state.on_answer(sent_at)
            self._executor.extend_lease(self._state.stop_at)
            is_early = boot_seconds() - sent_at < self._beat_seconds / 2
            await asyncio.sleep(max(rest_seconds, SHORTEST_REST_SECONDS if is_early else 0.0))

    def _lose(self) -> None:
        """The attempt was given to another agent: kill it here and report nothing."""
        self._executor.kill(self._order.key, self._order.epoch, "lease lost")
        self._is_lost = True
        self._log.error("lease_lost")
        self._give_up.set()
        if not self._executor.held():
            self._end(OutcomeKind.KILLED, "lease lost")

    async def _stop_when_asked(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        await stop.wait()
        self._log.info("service_stopping")
        if not self._executor.held():
            self._end(OutcomeKind.GIVEN_BACK, _STOPPED)
        await self._executor.stop_within(self._grace_seconds, hurry)
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self._give_up.set()

    async def _tell(self, outcome: Outcome) -> AgentExit:
        """Write the outcome to disk, then report it to the API."""
        if outcome.usage is not None and (peak := container_peak_bytes()) is not None:
            outcome = replace(outcome, usage=outcome.usage._replace(peak_memory_bytes=peak))
        self._log.info(
            "attempt_ended", outcome=outcome.kind.value, **({"reason": outcome.reason} if outcome.reason else {})
        )
        if self._is_lost:
            return AgentExit.NOT_OURS
        is_file = outcome.result_json is not None and bool(self._sent_apart(outcome.result_json))
        is_safe = await self._leave_outcome(outcome, has_result_elsewhere=is_file)
        try:
            if is_file:
                outcome = await self._patiently(lambda: self._send_result(outcome))
                is_safe = await self._leave_outcome(outcome)
            patience = self._report_seconds if is_safe else inf
            await self._patiently(lambda: self._finish(outcome), patience)
        except LeaseLost as error:
            self._log.error("lease_lost", error=error)
            return AgentExit.NOT_OURS
        except EvertickError as error:
            self._log.error("outcome_unreported", error=error, is_left_behind=is_safe)
            return AgentExit.NOT_OURS if self._is_lost else AgentExit.UNREPORTED
        self._executor.settle([(outcome.key, outcome.epoch)])
        self._log.info("task_finished", outcome=outcome.kind.value)
        return _exit_of(outcome.kind)

    async def _leave_outcome(self, outcome: Outcome, *, has_result_elsewhere: bool = False) -> bool:
        """Returns whether the whole outcome is safe in the file, if there is one. `has_result_elsewhere`: the API does
        not have its result yet."""
        path, session, left = self._settings.agent_outcome_file, self._order.session, outcome
        if path is None:
            return False
        if has_result_elsewhere:
            left = replace(outcome, kind=OutcomeKind.LOST, reason=_UNSENT, result_json=None)
        raw = to_bytes(left, session=session)
        try:
            await asyncio.to_thread(_write, path, raw)
        except OSError as error:
            self._log.warning("outcome_write_failed", path=str(path), error=error)
            return False
        found = parse(raw, key=outcome.key, epoch=outcome.epoch, session=session)
        return found is not None and found.kind is outcome.kind

    async def _patiently(self, ask: Callable[[], Awaitable[T]], seconds: float = inf, *, what: str = "finish") -> T:
        return await keep_asking(ask, until=self._give_up, seconds=seconds, what=what, log=self._log)

    def _sent_apart(self, result_json: str) -> dict[str, int]:
        """The file of the result, if it is in one; then only a reference is reported."""
        return files_in(json.loads(result_json)) if len(result_json) < 1000 else {}

    async def _send_result(self, outcome: Outcome) -> Outcome:
        assert outcome.result_json is not None
        for digest, size in self._sent_apart(outcome.result_json).items():
            path = self._settings.result_place.absolute() / str(outcome.key.run_id) / digest
            try:
                await self._line.put(f"/results/{digest}", path, size)
            except (ApiUnreachable, LeaseLost):
                raise
            except (EvertickError, OSError) as error:
                reason = f"its result could not be sent: {error}"
                return replace(outcome, kind=OutcomeKind.FAILED, reason=reason, result_json=None)
        return outcome

    async def _finish(self, outcome: Outcome) -> None:
        # The outcome marks the log as complete, so lines that were not accepted during an outage go first.
        if not await self._lines.flush(LAST_LINES_SECONDS):
            raise ApiUnreachable("the API accepted none of the last lines")
        try:
            await self._line.finish(outcome)
        except (ApiUnreachable, LeaseLost):
            raise
        except Conflict:
            raise LeaseLost("another agent has this attempt") from None
        except Unauthenticated:
            raise
        except EvertickError as error:
            # The API would refuse the same report every time.
            self._log.error("report_refused", error=error)
            reason = f"the outcome could not be stored: {error}"
            await self._line.finish(
                Outcome(key=outcome.key, epoch=outcome.epoch, kind=OutcomeKind.FAILED, reason=reason)
            )


def _exit_of(kind: OutcomeKind) -> AgentExit:
    match kind:
        case OutcomeKind.SUCCESS | OutcomeKind.SKIPPED | OutcomeKind.DEFERRED:
            return AgentExit.DONE
        case OutcomeKind.KILLED | OutcomeKind.GIVEN_BACK:
            return AgentExit.STOPPED
    return AgentExit.FAILED


class Agent:
    """`stop` ends the attempt within its grace period, `hurry` ends it at once. An attempt that has not ended is
    returned to the queue."""

    def __init__(
        self, settings: Settings, *, server: str, token: str, log: Log, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` is the environment that user code sees; None passes on all of the agent's own."""
        self._settings, self._log, self._environment = settings, log, environment
        self._line = AgentClient(server, token, log=log)
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    async def run(self) -> AgentExit:
        asked_at = boot_seconds()

        async def start() -> None:
            nonlocal asked_at
            asked_at = boot_seconds()
            self._told = await self._line.start()

        try:
            await keep_asking(start, until=self.stop, seconds=inf, what="start", log=self._log)
        except EvertickError as error:
            self._log.error("agent_start_failed", error=error)
            leave_refusal(self._settings.agent_outcome_file, str(error))
            # Another agent runs the attempt, it was canceled, or it no longer belongs to the task: there is nothing to
            # do here.
            return AgentExit.UNREPORTED if isinstance(error, ApiUnreachable) else AgentExit.NOT_OURS
        session = AgentSession(
            self._settings, self._told, line=self._line, heard_at=asked_at, log=self._log, environment=self._environment
        )
        return await session.run(self.stop, self.hurry)


def read_start_token(settings: Settings) -> str:
    """Read the start token from the named file or variable. Raises InvalidSettings, which never quotes the token."""
    return read_token(
        settings.agent_token,
        settings.agent_token_file,
        what="the start token",
        needs="an agent needs its start token: name the file that contains it with --token-file or EVERTICK_AGENT_TOKEN_FILE.",
    )


LOG_SECONDS = 0.5
PAUSE_SECONDS = 2.0
# Encoded as JSON, a line can be six times as long; one request must stay below the API's size limit.
CHUNKS_PER_REQUEST = 8


class AgentLog:
    """Ships the attempt's log lines to the API while it runs. While the API is unreachable they wait in the spool file.

    No chunk is sent before the previous ones are stored, so there are neither gaps nor duplicates.
    """

    def __init__(self, line: AgentClient, executor: LocalExecutor, *, log: Log) -> None:
        self._line, self._executor, self._log = line, executor, log
        self._unsent: list[LogChunk] = []
        self._is_unanswered = False
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Run until canceled."""
        while True:
            is_heard = await self._ship() is not None
            await asyncio.sleep(LOG_SECONDS if is_heard else PAUSE_SECONDS)

    async def flush(self, seconds: float) -> bool:
        """Send all remaining lines. False if the API did not answer, so that lines are left to send later. Lines that
        take too long or are refused are dropped."""
        give_up_at = time.monotonic() + seconds
        while await self._ship():
            if time.monotonic() > give_up_at:
                self._log.warning("logs_left_in_spool", chunks=len(self._unsent))
                return True
        return not (self._unsent and self._is_unanswered)

    async def _ship(self) -> int | None:
        """The number of chunks sent; None if the API did not accept them."""
        async with self._sending:
            # Polling again tells the executor that the previous chunks are stored, so send those first.
            if not self._unsent:
                self._unsent = self._executor.poll_logs()
            sent = 0
            while self._unsent:
                batch = self._unsent[:CHUNKS_PER_REQUEST]
                try:
                    await self._line.ship(batch)
                except EvertickError as error:
                    self._is_unanswered = isinstance(error, ApiUnreachable)
                    self._log.warning("log_upload_failed", chunks=len(self._unsent), error=error)
                    return None
                self._unsent = self._unsent[len(batch) :]
                sent += len(batch)
            return sent
