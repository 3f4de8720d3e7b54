"""The runner's end of one attempt's process: its socket, its spool file, its running attempts, and the limits.

Never blocks the loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from evertick.attempts.child_setup import RECEIVE_BYTES, ReuseLimits
from evertick.attempts.protocol import Frames, frame
from evertick.domain.attempt import AttemptOrder, OutcomeKind, Usage
from evertick.logs.spool import AttemptLog, LogCap, SpoolFile
from evertick.storage.result_files import ResultFiles

if TYPE_CHECKING:
    from evertick.executors.local.fork_server_client import ForkServerClient

# Most bodies start within 2 ms of their order. Shorter start times are not stored.
_TOLD_START_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class Attempt:
    """One order on its way from `start_many` to its outcome, and until its log is stored."""

    order: AttemptOrder
    ordered_at: float
    link: ChildProcess | None = None
    number: int = 0
    started_at: float = 0.0
    timer: asyncio.TimerHandle | None = None
    verdict: tuple[OutcomeKind, str] | None = None
    log: AttemptLog | None = None
    spool: SpoolFile | None = None
    # Problems with the log, reported at its end.
    last_words: bytes = b""
    is_drained: bool = False
    is_settled: bool = False
    # When its log was last read, of a trigger.
    polled_at: float = 0.0

    def told_start_seconds(self) -> float | None:
        """How long its code was fetched, imported or waited for, if that is worth storing."""
        seconds = self.started_at - self.ordered_at
        return seconds if seconds >= _TOLD_START_SECONDS else None


@dataclass(slots=True, eq=False)
class ChildProcess:
    """A child that waits for an order, runs some, or is disconnected. `put` receives its messages.

    Only `parent` can kill it safely: the pid cannot be reused before its parent has reaped it.
    """

    parent: ForkServerClient
    number: int
    pid: int
    sock: socket.socket
    spool: SpoolFile
    log_end: int
    put: Callable[[ChildProcess, list[Any]], None]
    running: dict[int, Attempt] = field(default_factory=dict)
    last_number: int = 0
    is_worn: bool = False
    is_shared: bool = False
    is_loaded: bool = False
    is_guarded: bool = False
    fate: str | None = None
    hung_up_at: float | None = None
    # Of the whole process, once it is dead without a report.
    usage: Usage | None = None
    born_at: float = 0.0
    _frames: Frames = field(default_factory=Frames)
    _unsent: bytes = b""
    _is_open: bool = True
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self.born_at = self._loop.time()
        self.spool.acquire()
        self.sock.setblocking(False)
        self._loop.add_reader(self.sock.fileno(), self.receive)

    def usage_of_only_attempt(self) -> Usage | None:
        """What the dead process used, if it ran no more than one attempt."""
        return self.usage if self.last_number == 1 and not self.is_shared else None

    def send(self, frames: bytes) -> None:
        """Usually one system call; only a large order has to wait until the child reads."""
        if self._unsent:
            self._unsent += frames
            return
        try:
            sent = self.sock.send(frames)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the child is gone: its fork server reports how
        if sent < len(frames):
            self._unsent = frames[sent:]
            self._loop.add_writer(self.sock.fileno(), self._send_rest)

    def set_verdict(self, kind: OutcomeKind, reason: str) -> None:
        """The attempt is being killed: record this verdict as its outcome, not the way it dies."""
        for attempt in self.running.values():
            attempt.verdict = attempt.verdict or (kind, reason)

    def cancel(self, number: int, reason: str) -> None:
        """Ask one of several coroutines to stop."""
        self.send(frame(("cancel", number, reason)))

    def receive(self) -> None:
        """Process every message that has arrived. A disconnect is only noted: the fork server reports the reason."""
        while self._is_open:
            try:
                received = self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                received = b""
            if not received:
                self._close()
                return
            try:
                messages = self._frames.feed(received)
            except (ValueError, StopIteration):
                # User code wrote into our socket: nothing from it can be trusted any more.
                self._close()
                self.parent.kill(self)
                return
            for message in messages:
                self.put(self, message)
            if len(received) < RECEIVE_BYTES:
                return

    def close(self) -> None:
        """Close the connection; the child then exits by itself."""
        if self.hung_up_at is None:
            self.hung_up_at = self._loop.time()
            self._close()
            self.spool.stop_reading()
            self.spool.stop_keeping()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self.sock.fileno())
            if self._unsent:
                self._loop.remove_writer(self.sock.fileno())
            self.sock.close()

    def _send_rest(self) -> None:
        rest, self._unsent = self._unsent, b""
        self._loop.remove_writer(self.sock.fileno())
        self.send(rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """`min_idle` and `max_idle` bound the idle children of the process pool, per bundle."""

    max_parents: int = 8
    parent_age_seconds: float = 3600.0
    min_idle: int = 2
    max_idle: int = 32
    idle_decay_seconds: float = 5.0
    warm_idle_seconds: float = 30.0
    load_seconds: float = 60.0
    kill_confirm_seconds: float = 3.0
    coroutine_grace_seconds: float = 1.0
    inline_log_bytes: int = 64 * 1024
    log_cap: LogCap = field(default_factory=LogCap)
    reuse: ReuseLimits = field(default_factory=ReuseLimits)
    results: ResultFiles = field(default_factory=ResultFiles)
