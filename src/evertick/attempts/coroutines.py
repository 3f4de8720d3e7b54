"""Async functions inside an attempt's process: one alone, or many at once in a reused child. The only user of asyncio
there."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
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
from evertick.attempts.protocol import AttemptIO, Frames, Report, Start, frame
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
    """One coroutine's own file, created for its first line: most small tasks write none."""

    __slots__ = ("_header", "path")

    def __init__(self, path: str, header: bytes) -> None:
        super().__init__(-1)
        self.path = path
        self._header = header

    def append(self, spooled: bytes) -> None:
        if self.fd < 0:
            try:
                self.fd = open_spool(self.path)
            except OSError:
                self.dropped_bytes += len(spooled)
                return
            super().append(self._header)
        super().append(spooled)

    def close(self) -> int:
        """The file's size; 0 if it was never created."""
        if self.fd < 0:
            return 0
        size = os.fstat(self.fd).st_size
        os.close(self.fd)
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

    async def serve(self, messages: list[list[Any]]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as self._group:
            for message in messages:
                self._accept(message)
            loop.add_reader(self._setup.fd, self._receive)
            await self._hung_up.wait()
            os._exit(REPORTED_EXIT_CODE)

    def _receive(self) -> None:
        received = os.read(self._setup.fd, RECEIVE_BYTES)
        if not received:
            self._hung_up.set()
        for message in self._frames.feed(received):
            self._accept(message)

    def _accept(self, message: list[Any]) -> None:
        if message[0] == "cancel":
            if message[1] in self._running:
                _cancel(*self._running[message[1]])
            return
        start = Start._make(message)
        try:
            bound = self._loaded.find(start.dag, start.task)
            context = context_of(start, bound, threading.Event())
        except Exception as error:
            self._send(report_of_error(start.number, error, AttemptIO(self._setup.captured.current.write_text)))
            return
        task = self._group.create_task(self._attempt(start, bound, context))
        self._running[start.number] = task, context
        task.add_done_callback(lambda _: self._ended_unstarted(start.number))

    async def _attempt(self, start: Start, bound: BoundTask, context: TaskContext) -> None:
        header = format.header(start.run_id, start.idx, start.map_index, start.epoch, start.session)
        spool = _Spool(coroutine_spool(self._setup.log_path, self._setup.number, start.number), header)
        self._setup.captured.of_coroutine.set(spool)
        report = await await_body(start, bound, context, AttemptIO(spool.write_text, self._setup.files))
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that the body forked: only the original process reports
        finish_lines()
        self._take_raw_output(spool)
        del self._running[start.number]
        if not self._running:
            kill_remaining_processes(self._spared)
        size = spool.close()
        self._send(report._replace(log_end=size, log_trouble=spool.trouble()))

    def _ended_unstarted(self, number: int) -> None:
        """A coroutine that is canceled before its first step never reports by itself."""
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
        send(self._setup.fd, b"".join(outbox))


def _cancel(body: asyncio.Task[Any], context: TaskContext) -> None:
    context.cancelled.set()
    body.cancel()
