"""The setup of every attempt's process: its socket, its log, its limits, and the rule to leave no process behind."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from dataclasses import dataclass

from evertick.attempts.protocol import Report
from evertick.domain.attempt import OutcomeKind
from evertick.logs.capture import Captured
from evertick.processes.system import (
    IS_PORTABLE,
    SignalMask,
    become_session_leader,
    become_subreaper,
    block_signals,
    children_of,
    die_with_parent,
    reap_any,
    resident_bytes,
)
from evertick.processes.tree import kill_tree
from evertick.storage.result_files import ResultFiles

RECEIVE_BYTES = 256 * 1024
# The exit code of a child that has reported: its fork server need not hurry to notify the runner.
REPORTED_EXIT_CODE = 75
_WEIGH_EVERY_ATTEMPTS = 20
_LONGEST_KILL_SECONDS = 0.2
_SIGKILL = int(signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseLimits:
    """When a reused child is replaced by a fresh one, in addition to after any failure."""

    attempts: int = 1000
    growth_bytes: int = 256 * 1024 * 1024
    spool_bytes: int = 16 * 1024 * 1024


class Cancellation:
    """Tells the running attempt that SIGTERM asked it to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def for_next_attempt(self) -> threading.Event:
        if self._event.is_set():
            self._event = threading.Event()
        return self._event

    def __call__(self, _signum: int, _frame: object) -> None:
        # In a thread of its own: the code that the signal interrupted may hold the event's lock.
        _thread.start_new_thread(self._event.set, ())


@dataclass(slots=True, kw_only=True)
class ChildSetup:
    """What a fork server passes to a child that it forks. Plain descriptors: objects around them would only be copied.
    `is_urgent`: its order waits already."""

    number: int
    fd: int
    log_fd: int
    log_path: str
    log_start: int
    own_fds: tuple[int, int]
    parent_pid: int
    is_urgent: bool
    captured: Captured
    cancellation: Cancellation
    limits: ReuseLimits
    files: ResultFiles


def adopt_fds(setup: ChildSetup, unwanted: list[tuple[int, int]]) -> None:
    """Move the descriptors to their fixed numbers, and close those of the parent and of siblings."""
    fd, log_fd = setup.own_fds
    os.dup2(setup.fd, fd, False)
    os.dup2(setup.log_fd, log_fd, False)
    setup.fd, setup.log_fd = fd, log_fd
    for first, end in unwanted:
        os.closerange(first, end)


def enter_session(parent_pid: int, log_fd: int, blocked: SignalMask) -> None:
    """Lead a process group, die with the parent, adopt orphans, write to the log. Idempotent."""
    become_session_leader()
    die_with_parent(_SIGKILL, parent_pid)
    become_subreaper()
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    block_signals(blocked)


def send(fd: int, frames: bytes) -> None:
    while frames:
        frames = frames[os.write(fd, frames) :]


class ReuseBudget:
    """How much of its reuse budget a child has used."""

    def __init__(self, setup: ChildSetup) -> None:
        self._setup = setup
        self._served = 0
        self._first_weight = 0

    def should_retire(self, report: Report) -> bool:
        """Called once per attempt. Memory and disk are checked only occasionally: that costs 5 µs."""
        limits = self._setup.limits
        self._served += 1
        if report.kind is OutcomeKind.FAILED or self._served >= limits.attempts:
            return True
        if self._served % _WEIGH_EVERY_ATTEMPTS != 1:
            return False
        weight = resident_bytes()
        self._first_weight = self._first_weight or weight
        spooled = os.fstat(self._setup.log_fd).st_size
        return weight - self._first_weight > limits.growth_bytes or spooled > limits.spool_bytes


def kill_remaining_processes(spared: frozenset[int]) -> None:
    """Kill the processes that the body left running. Costs 1 µs when there are none, and never waits long.

    Orphans of orphans become children of this process, so another pass finds them. Processes that the import started
    are spared.
    """
    give_up_at = 0.0
    while True:
        while (reaped := reap_any()) > 0:
            continue
        if reaped < 0 and not IS_PORTABLE:
            return
        strangers = [pid for pid in children_of(os.getpid()) if pid not in spared]
        now = time.monotonic()
        give_up_at = give_up_at or now + _LONGEST_KILL_SECONDS
        if not strangers or now > give_up_at:
            return
        for pid in strangers:
            kill_tree(pid)
        time.sleep(0.001)
