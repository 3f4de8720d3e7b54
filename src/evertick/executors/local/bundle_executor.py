"""Runs one bundle's attempts: assigns orders to children, and stops them.

Never starts two bodies for one order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING, Any

from evertick.attempts.fork_server import LEASE_EXPIRED
from evertick.attempts.protocol import read_report, start_frame
from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.executors.local.child_process import Attempt, ChildProcess, ExecutorLimits
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.executors.local.process_pool import LoadFailure, ProcessPool
from evertick.logs.spool import AttemptLog, SpoolFolder
from evertick.processes.system import boot_seconds

if TYPE_CHECKING:
    from evertick.executors.local.executor import LocalExecutor


class BundleExecutor:
    """`executor` handles each step of its attempts. `contact_until`: until when the lease is valid, in seconds since
    boot."""

    def __init__(
        self, executor: LocalExecutor, place: BundlePlace, file: str, spool: SpoolFolder, limits: ExecutorLimits
    ) -> None:
        self._executor, self.place, self._limits = executor, place, limits
        self.contact_until = math.inf
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Attempt] = deque()
        self._warm: list[ChildProcess] = []
        self._shared: ChildProcess | None = None
        self._shared_frames: list[bytes] = []
        self._triggers: ChildProcess | None = None
        self.last_used_at = self._loop.time()
        self.pool = ProcessPool(self, place, file, spool, limits)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.pool.has_work

    def start(self, attempts: list[Attempt]) -> None:
        self.last_used_at = self._loop.time()
        self._waiting.extend(attempts)
        self.serve_waiting()
        if self._waiting:
            self.pool.missed(len(self._waiting))

    def stop(self, attempt: Attempt, grace_seconds: float) -> None:
        """End an attempt whose verdict is set. Reports to the executor when nothing of it is left."""
        link = attempt.link
        if link is None:
            self._waiting.remove(attempt)
            self._executor.on_lost(attempt, *(attempt.verdict or (OutcomeKind.KILLED, "stopped")))
        elif link.is_shared:
            link.cancel(attempt.number, attempt.verdict[1] if attempt.verdict else "")
            self._kill_after(attempt, max(grace_seconds, self._limits.coroutine_grace_seconds))
        elif grace_seconds > 0:
            link.parent.ask_to_stop(link)
            self._kill_after(attempt, grace_seconds)
        else:
            self._kill(attempt)

    def extend_lease(self, until: float) -> None:
        """The lease is valid until then: attempts that must not outlive it are stopped at that time."""
        self.contact_until = until
        self.pool.extend_lease(until)

    def tick(self, now: float) -> None:
        """Idle children that were not used for long exit, one at a time."""
        self.pool.tick(now)
        if self._warm and now - self.last_used_at > self._limits.warm_idle_seconds:
            self._warm.pop(0).close()
        link = self._triggers
        if link is not None and not link.running and now - self.last_used_at > self._limits.warm_idle_seconds:
            self._triggers = None
            link.close()

    def withdraw(self) -> list[Attempt]:
        """The orders that have not started, and now never will."""
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def serve_waiting(self) -> None:
        waiting = self._waiting
        while waiting and (link := self._find_child(waiting[0])) is not None:
            self._start_in(link, waiting.popleft())
        if self._shared_frames and self._shared is not None:
            self._shared.send(b"".join(self._shared_frames))
            self._shared_frames.clear()
        self.pool.refill(len(waiting))

    def _find_child(self, attempt: Attempt) -> ChildProcess | None:
        order = attempt.order
        if order.is_trigger:
            return self._find_trigger_child()
        if order.isolation is Isolation.PROCESS or order.command is not None:
            return self.pool.take()
        if (order.dag, order.task) in self.pool.coroutine_tasks:
            return self._find_shared_child()
        while self._warm:
            link = self._warm.pop()
            if not link.parent.is_retiring:
                return link
            link.close()
        return self.pool.take()

    def _find_shared_child(self) -> ChildProcess | None:
        link = self._shared
        if link is None or link.parent.is_retiring:
            self._shared = self.pool.take()
            if self._shared is not None:
                self._shared.is_shared = True
            if link is not None and not link.running:
                link.close()
        return self._shared

    def _find_trigger_child(self) -> ChildProcess | None:
        """It stays while its fork server is replaced: triggers may wait for days."""
        link = self._triggers
        if link is None or link.is_worn or (link.parent.is_retiring and not link.running):
            self._triggers = self.pool.take()
            if self._triggers is not None:
                self._triggers.is_shared = True
        return self._triggers

    def _start_in(self, link: ChildProcess, attempt: Attempt) -> None:
        if attempt.order.stops_on_lost_contact and not self._may_start(link, attempt):
            link.close()
            return
        link.last_number += 1
        attempt.number = link.last_number
        attempt.link = link
        link.running[attempt.number] = attempt
        if attempt.order.is_trigger:
            link.send(start_frame(attempt.number, attempt.order))
        elif link.is_shared:
            self._shared_frames.append(start_frame(attempt.number, attempt.order, is_joining=True))
        else:
            attempt.spool = link.spool
            link.spool.acquire()
            attempt.log = AttemptLog(link.spool.fd, link.log_end, self._limits.log_cap)
            link.send(start_frame(attempt.number, attempt.order))
        self._executor.on_started(attempt)

    def _may_start(self, link: ChildProcess, attempt: Attempt) -> bool:
        """Whether an attempt that must not outlive the lease is guarded now; if not, it has ended."""
        if boot_seconds() >= self.contact_until:
            self._executor.on_lost(attempt, OutcomeKind.LOST, LEASE_EXPIRED)
            return False
        if not link.parent.guard(link, self.contact_until):
            self._executor.on_lost(attempt, OutcomeKind.GIVEN_BACK, "its fork server does not respond")
            return False
        return True

    def on_message(self, link: ChildProcess, message: list[Any]) -> None:
        if message[0] == "loaded":
            self.pool.on_loaded(link, *message[1:])
            return
        if message[0] == "ask":
            _, number, verb, args, *ask_id = message
            if (asking := link.running.get(number)) is not None:
                self._executor.on_ask(asking, link, verb, args, *ask_id)
            return
        report = read_report(message)
        attempt = link.running.get(report.number)
        if attempt is None:
            return
        if attempt.verdict is not None and not link.is_shared:
            link.close()  # it was asked to stop: only its death counts, which this speeds up
            return
        del link.running[report.number]
        link.is_worn = link.is_worn or report.should_retire
        if not link.is_shared:
            link.log_end = report.log_end or 0
        self._executor.on_ended(attempt, report)
        self._release(link, attempt)
        if self._waiting:
            self.serve_waiting()

    def _release(self, link: ChildProcess, attempt: Attempt) -> None:
        """After an attempt, a child waits for the next order or exits."""
        is_leaving = link.is_worn or link.parent.is_retiring
        self.last_used_at = self._loop.time() if attempt.order.is_trigger else self.last_used_at
        if link.is_shared:
            if is_leaving and self._shared is link:
                self._shared = None
            if is_leaving and self._triggers is link and not link.running:
                self._triggers = None
            if is_leaving and not link.running:
                link.close()
        elif attempt.order.isolation is Isolation.PROCESS or is_leaving:
            link.close()
        else:
            self._warm.append(link)

    def on_child_died(self, link: ChildProcess, status: int) -> None:
        self._forget(link)
        for attempt in link.running.values():
            if attempt.verdict is None and link.fate is not None:
                self._executor.on_lost(attempt, OutcomeKind.KILLED, link.fate)
            else:
                self._executor.on_died(attempt, status)
        link.running.clear()
        self.serve_waiting()

    def on_child_lost(self, link: ChildProcess, reason: str) -> None:
        self._forget(link)
        for attempt in link.running.values():
            # No more the task's fault than the death of the runner: it runs again, with the same limit.
            self._executor.on_lost(attempt, *(attempt.verdict or (OutcomeKind.LOST, reason)))
        link.running.clear()

    def _forget(self, link: ChildProcess) -> None:
        if link is self._shared:
            self._shared = None
        if link is self._triggers:
            self._triggers = None
        if link in self._warm:
            self._warm.remove(link)

    def fail_waiting(self, failure: LoadFailure) -> None:
        for attempt in self.withdraw():
            kind = OutcomeKind.LOST if failure.is_ours else OutcomeKind.FAILED
            self._executor.on_lost(attempt, kind, failure.reason, failure.traceback)

    def _kill_after(self, attempt: Attempt, seconds: float) -> None:
        attempt.timer = self._loop.call_later(seconds, self._kill, attempt)

    def _kill(self, attempt: Attempt) -> None:
        link = attempt.link
        if link is None or attempt.number not in link.running:
            return
        if link.is_shared:
            self._forget(link)
            link.fate = f"the process it shared was killed, because {attempt.order.task} did not stop when asked"
        link.parent.kill(link)
        attempt.timer = self._loop.call_later(self._limits.kill_confirm_seconds, self._escalate, attempt, link)

    def _escalate(self, attempt: Attempt, link: ChildProcess) -> None:
        """The fork server did not respond, so it is ended, too; then by SIGKILL."""
        if attempt.number in link.running:
            link.parent.terminate()
            attempt.timer = self._loop.call_later(self._limits.kill_confirm_seconds, link.parent.destroy)
