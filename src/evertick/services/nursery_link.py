"""The client of the fork server in `evertick up`: request a service, learn how it ended. Without a fork server a
service is an ordinary child.

Both look the same to the supervisor. Opened once, before there is an event loop or a thread.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from evertick.execution.linux import die_with_parent
from evertick.services import nursery

_LONGEST_LINE = 1024 * 1024
_LONGEST_ANSWER_SECONDS = 5.0


class Served(Protocol):
    """A service's process, as the supervisor needs it."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    def send_signal(self, signal: int, /) -> None: ...
    def kill(self) -> None: ...
    async def wait(self) -> int: ...


class _Forked:
    """A service that the fork server forked. The fork server is its parent and reports how it ended."""

    def __init__(self, pid: int, pidfd: int, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdout, self._pidfd = pid, stdout, pidfd
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def send_signal(self, number: int, /) -> None:
        if not self._code.done():
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def ended(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)
            os.close(self._pidfd)

    def adopt(self) -> None:
        """The fork server is gone, and this process has inherited its children."""
        if not self._code.done():
            asyncio.get_running_loop().add_reader(self._pidfd, self._bury)

    def _bury(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # another thread reaped it first: only the fact that it ended is known
            self.ended(-signal.SIGKILL)
        else:
            self.ended(os.waitstatus_to_exitcode(status))


class _Asked(NamedTuple):
    answer: asyncio.Future[_Forked | None]
    stream: asyncio.StreamReader


class Nursery:
    """Requests services. Without a fork server, or after it died, they are started as ordinary processes."""

    def __init__(self, main: nursery.Main | None = None) -> None:
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._forked: dict[int, _Forked] = {}
        self._socket: socket.socket | None = None
        self.pid: int | None = None
        self.lost: Callable[[], None] = lambda: None
        if main is not None:
            with suppress(OSError):
                self._open(main)

    def _open(self, main: nursery.Main) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for side in (ours, theirs):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nursery.LONGEST_MESSAGE)
        ours.setblocking(False)
        # Objects that exist now are never garbage: a collection would only write to their pages, and each write copies
        # a page.
        gc.collect()
        gc.freeze()
        parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            nursery.live(theirs, main, parent_pid)
        theirs.close()
        self._socket = ours

    async def start(self, arguments: list[str], environment: Mapping[str, str], stdin: int | None = None) -> Served:
        """Run `evertick ARGUMENTS` with this environment and its output in a pipe; it dies with this process.

        A service that gets a port as its standard input has its own interpreter: it imports libraries that no other
        service needs.
        """
        if self._socket is not None and stdin is None:
            forked = await self._fork(self._socket, arguments, environment)
            if forked is not None:
                return forked
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "evertick.cli.main", *arguments),
            env=dict(environment),
            stdout=PIPE,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
            limit=_LONGEST_LINE,
            preexec_fn=_die_with(os.getpid()),
        )

    def close(self) -> None:
        """End the fork server at once: the services it forked have ended, or end because of this."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self.pid is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.pid = None

    async def _fork(self, to: socket.socket, arguments: list[str], environment: Mapping[str, str]) -> _Forked | None:
        loop = asyncio.get_running_loop()
        loop.add_reader(to, self._hear)
        stream = asyncio.StreamReader(limit=_LONGEST_LINE)
        reading, writing = os.pipe()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
        )
        number, asked = next(self._numbers), _Asked(loop.create_future(), stream)
        request = {"number": number, "arguments": arguments, "environment": dict(environment)}
        self._asked[number] = asked
        try:
            socket.send_fds(to, [json.dumps(request).encode()], [writing])
            forked = await asyncio.wait_for(asked.answer, _LONGEST_ANSWER_SECONDS)
        except (OSError, TimeoutError):  # it is gone or hangs, or the environment exceeds the message size
            forked = None
        finally:
            os.close(writing)
        if forked is None:
            pipe.close()
        return forked

    def _hear(self) -> None:
        assert self._socket is not None
        try:
            text, fds, _flags, _address = socket.recv_fds(self._socket, nursery.LONGEST_MESSAGE, 1)
        except BlockingIOError:
            return
        except OSError:
            text, fds = b"", []
        if not text:
            self._lose()
            return
        message = json.loads(text)
        if "ended" in message:
            self._forked.pop(message["ended"]).ended(message["code"])
        elif fds:
            self._born(self._asked.pop(message["number"]), message["pid"], fds[0])
        elif not (answer := self._asked.pop(message["number"]).answer).done():
            answer.set_result(None)

    def _born(self, asked: _Asked, pid: int, pidfd: int) -> None:
        forked = self._forked[pid] = _Forked(pid, pidfd, asked.stream)
        if asked.answer.done():  # too late: the caller has started another one, or no longer needs one
            forked.kill()
        else:
            asked.answer.set_result(forked)

    def _lose(self) -> None:
        """The fork server died: its services received SIGTERM, and this process reaps them."""
        self.close()
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_result(None)
        self._asked.clear()
        for forked in self._forked.values():
            forked.adopt()
        self._forked.clear()
        self.lost()


def _die_with(parent_pid: int) -> Callable[[], None]:
    """In the child before exec: an orphaned service would hold the home and the leases of a dead installation."""

    def prepare() -> None:
        os.setpgid(0, 0)
        die_with_parent(signal.SIGTERM, parent_pid)

    return prepare
