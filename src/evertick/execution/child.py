"""Inside an attempt's process: wait for an order, run it, report. Never outlives its parent.

A single-use child runs one order and exits; a warm one goes on until the runner hangs up.
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from evertick.authoring.context import TaskContext
from evertick.domain.attempt import AttemptOrder, Isolation
from evertick.execution import lines
from evertick.execution.body import context_of, report_of_error, run_body
from evertick.execution.capture import SpoolWriter, capture_logging, finish_lines
from evertick.execution.linux import become_subreaper, die_with_parent
from evertick.execution.loaded import Loaded
from evertick.execution.protocol import Frames, Report, frame, read_start
from evertick.execution.seat import RECEIVE_BYTES, ChildSeat, Wear, leave_no_process
from evertick.execution.shell import become_shell


class Child:
    """A process that runs attempts, one after the other."""

    def __init__(self, seat: ChildSeat) -> None:
        self._seat = seat
        self._writer = SpoolWriter(seat.log_fd)
        self._wear = Wear(seat)
        self._frames = Frames()
        self._messages: deque[list[Any]] = deque()
        self._context: TaskContext | None = None

    def live(self, code: Loaded | Callable[[], Loaded]) -> NoReturn:
        """Until the runner hangs up or the one attempt is over. Does not return into the parent's code."""
        try:
            self._settle_in()
            loaded = code if isinstance(code, Loaded) else self._load(code)
            capture_logging(self._seat.captured)
            while (message := self._next_message()) is not None:
                if message[0] == "join":
                    _serve_coroutines(self._seat, loaded, [message, *self._messages])
                    break
                self._attempt(*read_start(message), loaded)
        except OSError:
            pass  # the runner is gone, and with it everybody who would want to hear of it
        finally:
            os._exit(0)

    def _settle_in(self) -> None:
        os.setsid()
        die_with_parent(signal.SIGKILL, self._seat.parent_pid)
        become_subreaper()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._cancel)
        os.dup2(self._seat.log_fd, 1)
        os.dup2(self._seat.log_fd, 2)
        self._seat.captured.writer = self._writer
        gc.enable()

    def _load(self, load: Callable[[], Loaded]) -> Loaded:
        """Import here what cannot be forked. The runner uses this child only when it knows how that went."""
        loaded = load()
        message = ("loaded", loaded.failure, loaded.traceback, loaded.coroutine_tasks())
        self._seat.sock.sendall(frame(message))
        return loaded

    def _next_message(self) -> list[Any] | None:
        while not self._messages:
            received = self._seat.sock.recv(RECEIVE_BYTES)
            if not received:
                return None
            self._messages.extend(self._frames.feed(received))
        return self._messages.popleft()

    def _attempt(self, number: int, order: AttemptOrder, loaded: Loaded) -> None:
        writer = self._writer
        writer.append(lines.header(lines.Header(order.key, order.epoch, order.session)))
        report = self._run(number, order, loaded)
        finish_lines()
        leave_no_process()
        report = report._replace(
            log_end=os.fstat(writer.fd).st_size,
            log_trouble=writer.trouble(),
            should_retire=self._wear.should_retire(report),
        )
        writer.dropped_bytes = 0
        self._seat.sock.sendall(frame(report))
        if order.isolation is Isolation.PROCESS:
            os._exit(0)

    def _run(self, number: int, order: AttemptOrder, loaded: Loaded) -> Report:
        say = self._writer.write_text
        try:
            bound = loaded.find(order.dag, order.task)
            if order.command is not None:
                become_shell(order, bound)
            self._context = context = context_of(order)
        except Exception as error:
            return report_of_error(number, error, say)
        if bound.is_async:
            return _run_alone(number, order, bound, context, say)
        return run_body(number, order, bound, context, say)

    def _cancel(self, _signum: int, _frame: object) -> None:
        if self._context is not None:
            # In a thread of its own: the code that the signal interrupted may hold the event's lock.
            _thread.start_new_thread(self._context.cancelled.set, ())


# asyncio is imported only where it is needed: it doubles the memory that each fork has to copy (1.1 ms against 0.5 ms).


def _serve_coroutines(seat: ChildSeat, loaded: Loaded, messages: list[list[Any]]) -> None:
    from evertick.execution.coroutines import serve_coroutines

    serve_coroutines(seat, loaded, messages)


def _run_alone(*attempt: Any) -> Report:
    from evertick.execution.coroutines import run_alone

    return run_alone(*attempt)
