"""Async functions inside an attempt's process: one alone, or many at once in a reused child; and triggers, many at once
in a child of their own. The only user of asyncio there."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from evertick.attempts.body import Loaded, await_body, context_of, report_of_error
from evertick.attempts.child_setup import (
    RECEIVE_BYTES,
    REPORTED_EXIT_CODE,
    ChildSetup,
    ReuseBudget,
    kill_remaining_processes,
    send,
)
from evertick.attempts.durable import durable_of
from evertick.attempts.loop_watch import watch_loop
from evertick.attempts.protocol import AskRefused, AttemptIO, Frames, Report, Start, frame
from evertick.domain.attempt import OutcomeKind
from evertick.logs import format
from evertick.logs.capture import SpoolWriter, finish_lines
from evertick.logs.spool import coroutine_spool, open_spool
from evertick.sdk.runtime import BoundTask, TaskContext


def run_alone(start: Start, bound: BoundTask, context: TaskContext, io: AttemptIO) -> Report:
    """Run an async function in a process of its own. SIGTERM cancels it."""

    async def main() -> Report:
        async with asyncio.TaskGroup() as group:
            body = group.create_task(await_body(start, bound, context, io))
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel, body, context)
        return body.result()

    try:
        return asyncio.run(main())
    except BaseException as error:
        return report_of_error(start.number, error, io, bound.retry)


def serve_coroutines(
    setup: ChildSetup, loaded: Loaded, spared: frozenset[int], messages: list[list[Any]], frames: Frames
) -> None:
    """Run every order that arrives as a coroutine concurrently with the others, until the runner closes the connection."""
    asyncio.run(_CoroutineServer(setup, loaded, spared, frames).serve(messages))


class _Spool(SpoolWriter):
    """One coroutine's own file, created for its first line: most small tasks write none. One that `is_seldom` written to
    is open only while it is: a thousand triggers are more than the descriptors of a process."""

    __slots__ = ("_header", "_is_seldom", "path")

    def __init__(self, path: str, header: bytes, *, is_seldom: bool = False) -> None:
        super().__init__(-1)
        self.path = path
        self._header, self._is_seldom = header, is_seldom

    def append(self, spooled: bytes) -> None:
        if self.fd < 0:
            try:
                self.fd = open_spool(self.path, is_new=bool(self._header))
            except OSError:
                self.dropped_bytes += len(spooled)
                return
            spooled, self._header = self._header + spooled, b""
        super().append(spooled)
        if self._is_seldom:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> int:
        """The file's size; 0 if it was never created."""
        if self._header:
            return 0
        fd = self.fd if self.fd >= 0 else open_spool(self.path, is_new=False)
        size = os.fstat(fd).st_size
        os.close(fd)
        return size


class _CoroutineServer:
    def __init__(self, setup: ChildSetup, loaded: Loaded, spared: frozenset[int], frames: Frames) -> None:
        self._setup = setup
        self._spared = spared
        self._loaded = loaded
        self._reuse = ReuseBudget(setup)
        self._pid = os.getpid()
        self._frames = frames
        self._running: dict[int, tuple[asyncio.Task[None], TaskContext]] = {}
        self._outbox: list[bytes] = []
        self._raw_seen = os.fstat(setup.log_fd).st_size
        self._hung_up = asyncio.Event()
        self._spools: dict[asyncio.Task[None], _Spool] = {}
        self._answers: dict[int, Future[list[Any]]] = {}
        self._ask_ids = itertools.count()
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(setup.fd, select.POLLIN)

    async def serve(self, messages: list[list[Any]]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            for message in messages:
                self._accept(message)
            loop.add_reader(self._setup.fd, self._receive)
            if messages[0][0] == "trigger":
                watch_loop(loop, self._on_blocked)
            await self._hung_up.wait()
            os._exit(REPORTED_EXIT_CODE)

    def _receive(self) -> None:
        # A coroutine that asked has read what the loop has seen here, and reading would wait.
        if not self._readable.poll(0):
            return
        for message in self._read():
            self._accept(message)

    def _read(self) -> list[list[Any]]:
        """The messages that arrived, without the answers, which are taken by those who asked."""
        received = os.read(self._setup.fd, RECEIVE_BYTES)
        if not received:
            self._hung_up.set()
            for unanswered in self._answers.values():
                unanswered.set_exception(BrokenPipeError("the runner is gone"))
            self._answers.clear()
        messages = self._frames.feed(received)
        for message in messages:
            if message[0] == "answer" and (asked := self._answers.pop(message[3], None)) is not None:
                asked.set_result(message)
        return [message for message in messages if message[0] != "answer"]

    def _accept(self, message: list[Any]) -> None:
        if message[0] == "cancel":
            _, number, *reason = message
            if number in self._running:
                _cancel(*self._running[number], *reason)
            return
        start = Start._make(message)
        try:
            bound = self._loaded.find(start.dag, start.task)
            header = format.header(start.run_id, start.idx, start.map_index, start.epoch, start.session)
            path = coroutine_spool(self._setup.log_path, self._setup.number, start.number)
            spool = _Spool(path, header, is_seldom=start.verb == "trigger")
            io = AttemptIO(spool.write_text, self._setup.files, None, partial(self.ask, start.number))
            context = context_of(start, bound, threading.Event(), durable_of(start, io))
        except Exception as error:
            self._send(report_of_error(start.number, error, AttemptIO(self._setup.captured.current.write_text)))
            return
        task = self._group.create_task(self._attempt(start, bound, context, spool, io))
        self._running[start.number], self._spools[task] = (task, context), spool
        task.add_done_callback(partial(self._ended_unstarted, start.number))

    async def _attempt(
        self, start: Start, bound: BoundTask, context: TaskContext, spool: _Spool, io: AttemptIO
    ) -> None:
        self._setup.captured.of_coroutine.set(spool)
        if start.verb == "trigger":
            assert bound.report is not None, "only such tasks have triggers"
            report: Report = await bound.report.wait_for_trigger(start, io)  # type: ignore[attr-defined]
        else:
            report = await await_body(start, bound, context, io)
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that the body forked: only the original process reports
        finish_lines()
        self._take_raw_output(spool)
        del self._running[start.number]
        if not self._running:
            kill_remaining_processes(self._spared)
        size = spool.close()
        self._send(report._replace(log_end=size, log_trouble=spool.trouble()))

    def ask(self, number: int, verb: str, args: dict[str, Any]) -> Any:
        """Ask the runner, from any thread. In the thread of the loop everything else waits for the answer, too."""
        ask_id, answer = next(self._ask_ids), Future[list[Any]]()
        self._answers[ask_id] = answer
        with self._sending:
            send(self._setup.fd, frame(("ask", number, verb, args, ask_id)))
        if threading.current_thread() is threading.main_thread():
            while not answer.done():
                for message in self._read():
                    asyncio.get_running_loop().call_soon(self._accept, message)
        _, code, value, _ = answer.result()
        if code is not None:
            raise AskRefused(code, value)
        return value

    def _on_blocked(self, task: asyncio.Task[Any] | None, seconds: float, place: str | None) -> None:
        others = f"the {len(self._running) - 1} other triggers of this process"
        text = f"The trigger blocked {others} for {seconds:.1f} s: it must await instead of calling blocking code."
        if place is not None:
            text = f"The trigger has been blocking {others} for {seconds:.1f} s, at\n{place}"
        writer = self._setup.captured.writer if task is None else self._spools.get(task, self._setup.captured.writer)
        writer.write_text("WARNING", text)

    def _ended_unstarted(self, number: int, task: asyncio.Task[None]) -> None:
        """A coroutine that is canceled before its first step never reports by itself."""
        self._spools.pop(task, None)
        if self._running.pop(number, None) is not None:
            self._send(Report(number, OutcomeKind.FAILED, "canceled before it started"))

    def _take_raw_output(self, spool: _Spool) -> None:
        """Output of C code and subprocesses cannot be attributed: the next attempt that ends takes it."""
        size = os.fstat(self._setup.log_fd).st_size
        if size > self._raw_seen:
            raw = os.pread(self._setup.log_fd, size - self._raw_seen, self._raw_seen)
            self._raw_seen = size
            spool.append(raw)

    def _send(self, report: Report) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame(report._replace(should_retire=self._reuse.should_retire(report))))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        with self._sending:
            send(self._setup.fd, b"".join(outbox))


def _cancel(body: asyncio.Task[Any], context: TaskContext, reason: str | None = None) -> None:
    context.cancelled.set()
    body.cancel(reason)
