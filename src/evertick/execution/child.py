"""Inside an attempt's process: wait for an order, run it, report. Never outlives its parent, never leaves a process behind.

A single-use child runs one order and exits; a warm one goes on until the runner hangs up.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from evertick.authoring.context import TaskContext
from evertick.domain.attempt import AttemptOrder, Isolation, OutcomeKind
from evertick.execution import lines
from evertick.execution.body import context_of, report_of_error, run_body
from evertick.execution.capture import Captured, SpoolWriter, capture_logging, finish_lines
from evertick.execution.kill import kill_tree
from evertick.execution.linux import become_subreaper, die_with_parent
from evertick.execution.loaded import Loaded
from evertick.execution.protocol import Frames, Report, frame, read_start
from evertick.execution.shell import become_shell

_RECEIVE_BYTES = 256 * 1024
_GROWTH_EVERY_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseLimits:
    """When a reused child is replaced by a fresh one."""

    attempts: int = 1000
    growth_bytes: int = 256 * 1024 * 1024
    spool_bytes: int = 16 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class ChildSeat:
    """What a warm parent gives a child that it forks."""

    sock: socket.socket
    log_fd: int
    log_path: str
    parent_pid: int
    captured: Captured
    limits: ReuseLimits


class Child:
    """A process that runs attempts, one after the other."""

    def __init__(self, seat: ChildSeat) -> None:
        self.seat = seat
        self.writer = SpoolWriter(seat.log_fd)
        self._frames = Frames()
        self._messages: deque[list[Any]] = deque()
        self._context: TaskContext | None = None
        self._served = 0
        self._first_rss = 0

    def live(self, load: Callable[[], Loaded]) -> NoReturn:
        """Runs until the runner hangs up or the one attempt is over. Does not return into the parent's code."""
        try:
            self._settle_in()
            loaded = load()
            capture_logging(self.seat.captured)
            while (message := self._next_message()) is not None:
                if message[0] == "join":
                    # asyncio would double the memory that every fork has to copy (1.1 ms each against 0.5 ms).
                    from evertick.execution.coroutines import serve_coroutines

                    serve_coroutines(self.seat, loaded, [message, *self._messages])
                    break
                self._attempt(*read_start(message), loaded)
        except OSError:
            pass  # the runner is gone, and so is everybody who would want to hear of it
        finally:
            os._exit(0)

    def _settle_in(self) -> None:
        os.setsid()
        die_with_parent(signal.SIGKILL, self.seat.parent_pid)
        become_subreaper()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._cancelled)
        os.dup2(self.seat.log_fd, 1)
        os.dup2(self.seat.log_fd, 2)
        self.seat.captured.writer = self.writer
        gc.enable()

    def _next_message(self) -> list[Any] | None:
        while not self._messages:
            received = self.seat.sock.recv(_RECEIVE_BYTES)
            if not received:
                return None
            self._messages.extend(self._frames.feed(received))
        return self._messages.popleft()

    def _attempt(self, number: int, order: AttemptOrder, loaded: Loaded) -> None:
        self.writer.append(lines.header(lines.Header(order.key, order.epoch, order.session)))
        report = self._run(number, order, loaded)
        finish_lines()
        leave_no_process()
        self._served += 1
        report = report._replace(
            log_end=os.fstat(self.writer.fd).st_size,
            log_trouble=self.writer.trouble(),
            should_retire=self._should_retire(report),
        )
        self.writer.dropped_bytes = 0
        self.seat.sock.sendall(frame(report))
        if order.isolation is Isolation.PROCESS:
            os._exit(0)

    def _run(self, number: int, order: AttemptOrder, loaded: Loaded) -> Report:
        say = self.writer.write_text
        try:
            if loaded.traceback:
                say("ERROR", loaded.traceback)
            bound = loaded.find(order.dag, order.task)
            if order.command is not None:
                become_shell(order, bound)
            self._context = context = context_of(order)
        except Exception as error:
            return report_of_error(number, error, say)
        if bound.is_async:
            from evertick.execution.coroutines import run_alone

            return run_alone(number, order, bound, context, say)
        return run_body(number, order, bound, context, say)

    def _cancelled(self, _signum: int, _frame: object) -> None:
        if self._context is not None:
            # In a thread of its own: the interrupted code may hold the event's lock.
            import _thread

            _thread.start_new_thread(self._context.cancelled.set, ())

    def _should_retire(self, report: Report) -> bool:
        limits = self.seat.limits
        if report.kind is OutcomeKind.FAILED or self._served >= limits.attempts:
            return True
        if self._served % _GROWTH_EVERY_ATTEMPTS == 1:
            rss = resident_bytes()
            self._first_rss = self._first_rss or rss
            return rss - self._first_rss > limits.growth_bytes or os.fstat(self.writer.fd).st_size > limits.spool_bytes
        return False


def resident_bytes() -> int:
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 128).split()[1]) * 4096
    finally:
        os.close(fd)


def leave_no_process() -> None:
    """Kill what the body started and left running. Costs 1 µs when there is nothing, and never waits long."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
        kill_tree(os.getpid(), spare_root=True)
        give_up_at = time.monotonic() + 0.2
        while time.monotonic() < give_up_at:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
