"""Runs one bundle's attempts: assigns orders to children, and stops them.

Puts an event for each step of an attempt. Never starts two bodies for one order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from evertick.attempts.fork_server import LEASE_EXPIRED
from evertick.attempts.protocol import Report, read_report, start_frame
from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.executors.local.child_process import Attempt, ChildMessage, ChildProcess, ExecutorLimits
from evertick.executors.local.fork_server_client import ChildDied
from evertick.executors.local.process_pool import (
    BundlePlace,
    ChildAvailable,
    ChildLost,
    LoadFailure,
    PoolEvent,
    ProcessPool,
)
from evertick.logs.spool import AttemptLog, SpoolFolder
from evertick.processes.linux import boot_seconds


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class AttemptReported:
    """The body ended and reported."""

    attempt: Attempt
    report: Report


@dataclass(frozen=True, slots=True)
class AttemptDied:
    """The process ended without a report. A shell also ends this way."""

    attempt: Attempt
    wait_status: int


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """It never started, or ended through no fault of its own."""

    attempt: Attempt
    kind: OutcomeKind
    reason: str
    log_text: str = ""


AttemptEvent = AttemptStarted | AttemptReported | AttemptDied | AttemptLost


class BundleExecutor:
    """`put` receives the events of its attempts. `contact_until`: until when the lease is valid, in seconds since boot."""

    def __init__(
        self,
        place: BundlePlace,
        file: str,
        spool: SpoolFolder,
        limits: ExecutorLimits,
        put: Callable[[AttemptEvent], None],
    ) -> None:
        self._put, self._limits = put, limits
        self.contact_until = math.inf
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Attempt] = deque()
        self._warm: list[ChildProcess] = []
        self._shared: ChildProcess | None = None
        self._shared_frames: list[bytes] = []
        self.last_used_at = self._loop.time()
        self.stock = ProcessPool(place, file, spool, limits, self._apply)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self.stock.has_work

    def start(self, attempts: list[Attempt]) -> None:
        self.last_used_at = self._loop.time()
        self._waiting.extend(attempts)
        self._serve_waiting()
        if self._waiting:
            self.stock.missed(len(self._waiting))

    def stop(self, attempt: Attempt, grace_seconds: float) -> None:
        """End an attempt whose verdict is set. An event follows when nothing of it is left."""
        link = attempt.link
        if link is None:
            self._waiting.remove(attempt)
            self._put(AttemptLost(attempt, *(attempt.verdict or (OutcomeKind.KILLED, "stopped"))))
        elif link.is_shared:
            link.cancel(attempt.number)
            self._kill_after(attempt, max(grace_seconds, self._limits.coroutine_grace_seconds))
        elif grace_seconds > 0:
            link.parent.ask_to_stop(link)
            self._kill_after(attempt, grace_seconds)
        else:
            self._kill(attempt)

    def extend_lease(self, until: float) -> None:
        """The lease is valid until then: attempts that must not outlive it are stopped at that time."""
        self.contact_until = until
        self.stock.extend_lease(until)

    def tick(self, now: float) -> None:
        """Idle children that were not used for long exit, one at a time."""
        self.stock.tick(now)
        if self._warm and now - self.last_used_at > self._limits.warm_idle_seconds:
            self._warm.pop(0).close()

    def withdraw(self) -> list[Attempt]:
        """The orders that have not started, and now never will."""
        waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def _serve_waiting(self) -> None:
        waiting = self._waiting
        while waiting and (link := self._find_child(waiting[0])) is not None:
            self._start_in(link, waiting.popleft())
        if self._shared_frames and self._shared is not None:
            self._shared.send(b"".join(self._shared_frames))
            self._shared_frames.clear()
        self.stock.refill(len(waiting))

    def _find_child(self, attempt: Attempt) -> ChildProcess | None:
        order = attempt.order
        if order.isolation is Isolation.PROCESS or order.command is not None:
            return self.stock.take()
        if (order.dag, order.task) in self.stock.coroutine_tasks:
            return self._find_shared_child()
        while self._warm:
            link = self._warm.pop()
            if not link.parent.is_retiring:
                return link
            link.close()
        return self.stock.take()

    def _find_shared_child(self) -> ChildProcess | None:
        link = self._shared
        if link is None or link.parent.is_retiring:
            self._shared = self.stock.take()
            if self._shared is not None:
                self._shared.is_shared = True
            if link is not None and not link.running:
                link.close()
        return self._shared

    def _start_in(self, link: ChildProcess, attempt: Attempt) -> None:
        if attempt.order.stops_on_lost_contact and not self._may_start(link, attempt):
            link.close()
            return
        link.last_number += 1
        attempt.number = link.last_number
        attempt.link = link
        link.running[attempt.number] = attempt
        if link.is_shared:
            self._shared_frames.append(start_frame(attempt.number, attempt.order, is_joining=True))
        else:
            attempt.spool = link.spool
            link.spool.acquire()
            attempt.log = AttemptLog(link.spool.fd, link.log_end, self._limits.log_cap)
            link.send(start_frame(attempt.number, attempt.order))
        self._put(AttemptStarted(attempt))

    def _may_start(self, link: ChildProcess, attempt: Attempt) -> bool:
        """Whether an attempt that must not outlive the lease is guarded now; if not, it has ended."""
        if boot_seconds() >= self.contact_until:
            self._put(AttemptLost(attempt, OutcomeKind.LOST, LEASE_EXPIRED))
            return False
        if not link.parent.guard(link, self.contact_until):
            self._put(AttemptLost(attempt, OutcomeKind.GIVEN_BACK, "its fork server does not respond"))
            return False
        return True

    def _apply(self, event: PoolEvent) -> None:
        match event:
            case ChildMessage():
                self._on_message(event.link, event.message)
            case ChildDied():
                self._on_child_died(event.link, event.status)
            case ChildLost():
                self._on_child_lost(event.link, event.reason)
            case ChildAvailable():
                self._serve_waiting()
            case LoadFailure():
                self._fail_waiting(event)
            case _:
                assert_never(event)

    def _on_message(self, link: ChildProcess, message: list[Any]) -> None:
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
        self._put(AttemptReported(attempt, report))
        self._release(link, attempt)
        if self._waiting:
            self._serve_waiting()

    def _release(self, link: ChildProcess, attempt: Attempt) -> None:
        """After an attempt, a child waits for the next order or exits."""
        is_leaving = link.is_worn or link.parent.is_retiring
        if link.is_shared:
            if is_leaving and self._shared is link:
                self._shared = None
            if is_leaving and not link.running:
                link.close()
        elif attempt.order.isolation is Isolation.PROCESS or is_leaving:
            link.close()
        else:
            self._warm.append(link)

    def _on_child_died(self, link: ChildProcess, status: int) -> None:
        self._forget(link)
        for attempt in link.running.values():
            if attempt.verdict is None and link.fate is not None:
                self._put(AttemptLost(attempt, OutcomeKind.KILLED, link.fate))
            else:
                self._put(AttemptDied(attempt, status))
        link.running.clear()
        self._serve_waiting()

    def _on_child_lost(self, link: ChildProcess, reason: str) -> None:
        self._forget(link)
        for attempt in link.running.values():
            self._put(AttemptLost(attempt, *(attempt.verdict or (OutcomeKind.KILLED, reason))))
        link.running.clear()

    def _forget(self, link: ChildProcess) -> None:
        if link is self._shared:
            self._shared = None
        if link in self._warm:
            self._warm.remove(link)

    def _fail_waiting(self, failure: LoadFailure) -> None:
        for attempt in self.withdraw():
            kind = OutcomeKind.KILLED if failure.is_ours else OutcomeKind.FAILED
            self._put(AttemptLost(attempt, kind, failure.reason, failure.traceback))

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
