"""Inside an attempt's process: wait for an order, run it, report. Never outlives its parent.

A single-use child runs one order and exits; a warm one goes on until the runner hangs up.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from evertick.authoring.resolve import BoundTask
from evertick.execution import lines
from evertick.execution.body import context_of, report_of_error, run_body
from evertick.execution.capture import SpoolWriter, capture_logging, finish_lines
from evertick.execution.kill import children_of
from evertick.execution.linux import become_subreaper, die_with_parent, unblock_signals
from evertick.execution.loaded import Loaded
from evertick.execution.protocol import Frames, Report, Start, frame
from evertick.execution.seat import REPORTED_EXIT_CODE, ChildSeat, Wear, leave_no_process, receive, send
from evertick.execution.shell import become_shell


class Child:
    """A process that runs attempts, one after the other."""

    def __init__(self, seat: ChildSeat) -> None:
        self._seat = seat
        self._writer = SpoolWriter(seat.log_fd)
        self._wear = Wear(seat)
        self._pid = 0
        self._spared: frozenset[int] = frozenset()
        self._frames = Frames()
        self._messages: deque[list[Any]] = deque()

    def live(self, code: Loaded | Callable[[], Loaded], others_fds: list[int]) -> NoReturn:
        """Until the runner hangs up or the one attempt is over. Does not return into the parent's code."""
        try:
            for fd in others_fds:
                if fd not in (self._seat.fd, self._seat.log_fd):
                    os.close(fd)
            self._settle_in()
            loaded = code if isinstance(code, Loaded) else self._load(code)
            self._rehearse()
            while (message := self._next_message()) is not None:
                if message[0] == "join":
                    _serve_coroutines(self._seat, loaded, self._spared, [message, *self._messages])
                    break
                self._attempt(Start._make(message), loaded)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the runner is gone, and with it everybody who would want to hear of it
        finally:
            if (error := sys.exception()) is not None:
                self._writer.write_text("ERROR", "".join(traceback.format_exception(error)))
            os._exit(REPORTED_EXIT_CODE)

    def _settle_in(self) -> None:
        os.setsid()
        die_with_parent(signal.SIGKILL, self._seat.parent_pid)
        become_subreaper()
        os.dup2(self._seat.log_fd, 1)
        os.dup2(self._seat.log_fd, 2)
        self._seat.captured.writer = self._writer
        self._pid = os.getpid()
        gc.enable()
        unblock_signals()

    def _load(self, load: Callable[[], Loaded]) -> Loaded:
        """Import here what cannot be forked. The runner uses this child only when it knows how that went."""
        loaded = load()
        capture_logging(self._seat.captured)
        self._spared = frozenset(children_of(self._pid))
        message = ("loaded", loaded.failure, loaded.traceback, loaded.coroutine_tasks())
        send(self._seat.fd, frame(message))
        return loaded

    def _next_message(self) -> list[Any] | None:
        while not self._messages:
            received = receive(self._seat.fd)
            if not received:
                return None
            self._messages.extend(self._frames.feed(received))
        return self._messages.popleft()

    def _attempt(self, start: Start, loaded: Loaded) -> None:
        writer = self._writer
        writer.append(lines.header(start.run_id, start.idx, start.map_index, start.epoch, start.session))
        report = self._run(start, loaded)
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that the body forked and let run on: only the original reports
        finish_lines()
        leave_no_process(self._spared)
        report = report._replace(
            log_end=os.fstat(writer.fd).st_size,
            log_trouble=writer.trouble(),
            should_retire=start.is_single_use or self._wear.should_retire(report),
        )
        writer.dropped_bytes = 0
        send(self._seat.fd, frame(report))
        if start.is_single_use:
            os._exit(REPORTED_EXIT_CODE)

    def _run(self, start: Start, loaded: Loaded) -> Report:
        say = self._writer.write_text
        try:
            bound = loaded.find(start.dag, start.task)
            if start.command is not None:
                become_shell(start, bound)
            context = context_of(start, self._seat.cancellation.for_next_attempt())
        except Exception as error:
            return report_of_error(start.number, error, say)
        if bound.is_async:
            return _run_alone(start, bound, context, say)
        return run_body(start, bound, context, say)

    def _rehearse(self) -> None:
        """Walk the way of an attempt once: the memory it touches is then this process's own before an order comes."""
        message = frame(Start("start", 0, 0, 0, -1, 0, 0, 0, "", "", "", None, "{}", "{}", True, None))
        start = Start._make(self._frames.feed(message)[0])
        lines.header(start.run_id, start.idx, start.map_index, start.epoch, start.session)
        context = context_of(start, self._seat.cancellation.for_next_attempt())
        report = run_body(start, BoundTask(name="", function=dict), context, self._writer.write_text)
        finish_lines()
        frame(report._replace(log_end=os.fstat(self._writer.fd).st_size, log_trouble=self._writer.trouble()))


# asyncio is imported only where it is needed: it doubles the memory that each fork has to copy (1.1 ms against 0.5 ms).


def _serve_coroutines(*everything: Any) -> None:
    from evertick.execution.coroutines import serve_coroutines

    serve_coroutines(*everything)


def _run_alone(*attempt: Any) -> Report:
    from evertick.execution.coroutines import run_alone

    return run_alone(*attempt)
