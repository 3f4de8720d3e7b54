"""Inside an attempt's process: wait for an order, run it, report. Never outlives its parent.

A single-use child runs one order and exits; a reused one continues until the runner closes the connection.
"""

from __future__ import annotations

import _thread
import gc
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from evertick.attempts.body import Loaded, context_of, report_of_error, run_body
from evertick.attempts.child_setup import (
    RECEIVE_BYTES,
    REPORTED_EXIT_CODE,
    ChildSetup,
    ReuseBudget,
    adopt_fds,
    enter_session,
    kill_remaining_processes,
    send,
)
from evertick.attempts.durable import durable_of
from evertick.attempts.protocol import AskRefused, AttemptIO, Frames, Report, Start, frame
from evertick.attempts.shell import become_shell
from evertick.logs import format
from evertick.logs.capture import CapturedStream, SpoolWriter, capture_logging, finish_lines
from evertick.processes.system import children_of, signal_mask
from evertick.processes.usage import UsageMeter
from evertick.sdk.runtime import BoundTask, enter

if TYPE_CHECKING:
    from evertick.attempts.injected_secrets import InjectedSecrets, MaskedOutput
    from evertick.secrets.masking import Masker

Find = Callable[[str, str], BoundTask]
_NO_SIGNALS = signal_mask(set())
# Most orders fit; for so few bytes Python uses memory that it already has.
_ORDER_BYTES = 448


class Child:
    """A process that runs attempts, one after the other."""

    def __init__(self, setup: ChildSetup, spared: frozenset[int] = frozenset()) -> None:
        self._setup = setup
        self._writer = SpoolWriter(setup.own_fds[1])
        self._reuse = ReuseBudget(setup)
        self._spared = spared
        self._frames = Frames()
        self._granted: InjectedSecrets | None = None
        self._masker: Masker | None = None
        self._output: MaskedOutput | None = None
        self._asking = _thread.allocate_lock()
        self._meter = UsageMeter()

    def live(self, code: Loaded | Callable[[], Loaded], unwanted: list[tuple[int, int]]) -> NoReturn:
        """Run until the runner closes the connection or the one attempt is over. Does not return into the parent's
        code."""
        setup = self._setup
        try:
            enter_session(setup.parent_pid, setup.log_fd, _NO_SIGNALS)
            gc.enable()
            self.warm_up()
            if isinstance(code, Loaded) and code.rehearsal is not None and not setup.is_urgent:
                code.rehearsal()
            adopt_fds(setup, unwanted)
            loaded = code if isinstance(code, Loaded) else self._load(code)
            while received := os.read(setup.fd, RECEIVE_BYTES if self._frames.is_cut else _ORDER_BYTES):
                messages = self._frames.feed(received)
                if messages and messages[0][0] in ("join", "trigger"):
                    # asyncio doubles the memory that each fork has to copy (1.1 ms against 0.5 ms).
                    from evertick.attempts.coroutines import serve_coroutines

                    serve_coroutines(setup, loaded, self._spared, messages, self._frames)
                for message in messages:
                    start = tuple.__new__(Start, message)
                    send(setup.fd, self._attempt(start, loaded.find))
                    if start.is_single_use:
                        os._exit(REPORTED_EXIT_CODE)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the runner is gone, and no process is left to report to
        finally:
            if (error := sys.exception()) is not None:
                self._writer.write_text("ERROR", "".join(traceback.format_exception(error)))
            os._exit(REPORTED_EXIT_CODE)

    def warm_up(self) -> None:
        """Run through an attempt once: the memory pages it writes are then copied before an order arrives."""
        self._setup.captured.writer = self._writer
        for message in self._frames.feed(_WARM_UP_ORDER):
            self._attempt(tuple.__new__(Start, message), _find_warm_up)

    def _load(self, load: Callable[[], Loaded]) -> Loaded:
        """Import here what cannot be forked. The runner uses this child only after it knows the result."""
        loaded = load()
        capture_logging(self._setup.captured)
        self._spared = frozenset(children_of(os.getpid()))
        message = ("loaded", loaded.failure, loaded.traceback, loaded.coroutine_tasks())
        send(self._setup.fd, frame(message))
        return loaded

    def _attempt(self, start: Start, find: Find) -> bytes:
        """Run it and return the frame of its report."""
        pid = os.getpid()
        writer = self._writer
        writer.append(format.header(start.run_id, start.idx, start.map_index, start.epoch, start.session))
        if start.granted_json:
            self._hide(start)
        self._meter.begin()
        report = self._run(start, find)
        if os.getpid() != pid:
            os._exit(0)  # a copy that the body forked: only the original process reports
        finish_lines()
        kill_remaining_processes(self._spared)
        if self._output is not None:
            self._output.close()
            self._output = self._masker = self._writer.mask = None
        trouble, writer.dropped_bytes = writer.trouble(), 0
        should_retire = start.is_single_use or self._reuse.should_retire(report)
        end = os.lseek(writer.fd, 0, os.SEEK_END)
        return frame((*report[:7], end, trouble, should_retire, self._meter.end(), report.skips))

    def _hide(self, start: Start) -> None:
        """The process with injected secrets runs only this attempt: nothing is left for the next."""
        from evertick.attempts.injected_secrets import InjectedSecrets

        self._granted = InjectedSecrets(start.granted_json)
        self._mask_output(self._granted.masker)

    def _mask_output(self, masker: Masker) -> None:
        from evertick.attempts.injected_secrets import MaskedOutput

        self._masker, self._writer.mask = masker, masker.hide
        self._output = MaskedOutput(self._writer, masker)

    def hide(self, text: str) -> str:
        """A part of `Masks`."""
        return text if self._masker is None else self._masker.hide(text)

    def add(self, secrets: list[str]) -> None:
        """A part of `Masks`: hide these in the output of the attempt from now on."""
        from evertick.secrets.masking import Masker

        if self._masker is None:
            self._mask_output(Masker(()))
        assert self._masker is not None
        self._masker.add(secrets)

    def _run(self, start: Start, find: Find) -> Report:
        io = AttemptIO(
            self._writer.write_text, self._setup.files, self._granted, partial(self._ask, start.number), self
        )
        try:
            bound = find(start.dag, start.task)
            context = context_of(
                start, bound, self._setup.cancellation.for_next_attempt(), durable_of(start, io), self._granted
            )
            if bound.report is not None:
                report: Report = bound.report(start, context, io)
                return report
            if start.command is not None:
                enter(context)
                if self._granted is not None:
                    from evertick.attempts.shell_process import run_shell

                    return run_shell(start, bound, io)
                become_shell(start, bound, io)
        except Exception as error:
            return report_of_error(start.number, error, io)
        if bound.is_async:
            from evertick.attempts.coroutines import run_alone

            return run_alone(start, bound, context, io)
        return run_body(start, bound, context, io)

    def _ask(self, number: int, verb: str, args: dict[str, Any]) -> Any:
        """Ask the runner, and wait for its answer. A copy that the body forked has no connection of its own."""
        if self._setup.parent_pid != os.getppid():
            raise AskRefused("unsupported", f"a process that the task started cannot ask for {verb!r}")
        with self._asking:
            send(self._setup.fd, frame(("ask", number, verb, args)))
            while not (messages := self._frames.feed(self._received())):
                continue
        _, code, value = messages[0]
        if code is not None:
            raise AskRefused(code, value)
        return value

    def _received(self) -> bytes:
        if not (received := os.read(self._setup.fd, RECEIVE_BYTES)):
            raise BrokenPipeError("the runner is gone")
        return received


def _warm_up_body() -> list[float]:
    """Does what most tasks do, with Evertick's own stream: a stream installed by user code must not receive this."""
    if isinstance(sys.stdout, CapturedStream):
        _PRINT("a line")
    return [0.5]


def _find_warm_up(_dag: str, _task: str) -> BoundTask:
    return _WARM_UP_TASK


_PRINT = print
_WARM_UP_TASK = BoundTask(name="", function=_warm_up_body)
_ANY_DATE = "2030-01-01T00:00:00+00:00"
_WARM_UP_ORDER = frame(Start("start", 0, 0, 0, -1, 0, 0, 0, "", "", "", _ANY_DATE, "{}", "{}", True, None, ""))
