"""The fork server: a process that has imported every service and forks one on request, so that they share that memory.

Forked by `evertick up` before it has any thread. Never runs a service itself and never outlives `up`: when it dies, the
services it forked shut down gracefully, as if `up` had died.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import select
import signal
import socket
import sys
import traceback
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn

from evertick.processes.system import IS_PORTABLE, die_with_parent, exit_fd, send_signal, tied_to_this_process

# A request contains a service's whole environment.
LONGEST_MESSAGE = 4 * 1024 * 1024


Main = Callable[[list[str]], int]


_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(requests: socket.socket, main: Main, parent_pid: int) -> NoReturn:
    """Fork services on request and report how each ended, until the client closes the socket."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL, parent_pid)
        # Ctrl-C in a terminal is meant for `up`, which then stops the services in order.
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        _name("fork-server")
        _ForkServer(requests, main).serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class _ForkServer:
    def __init__(self, requests: socket.socket, main: Main) -> None:
        self._requests, self._main = requests, main
        self._pids: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def serve(self) -> None:
        while True:
            for fd, _event in self._poll.poll():
                if fd != self._requests.fileno():
                    self._reap(fd)
                elif not self._take():
                    return

    def _take(self) -> bool:
        """Read one request, with the write end of the pipe for the service's output. False when the client has closed
        the socket."""
        text, fds, _flags, _address = socket.recv_fds(self._requests, LONGEST_MESSAGE, 1)
        if not text:
            return False
        asked = json.loads(text)
        try:
            pid = os.fork()
        except OSError as error:
            self._say({"number": asked["number"], "problem": str(error)})
        else:
            if pid == 0:
                self._become(asked["arguments"], asked["environment"], fds[0])
            pidfd = exit_fd(pid)
            self._pids[pidfd] = pid
            self._poll.register(pidfd, select.POLLIN)
            self._say({"number": asked["number"], "pid": pid}, pidfd)
        for fd in fds:
            os.close(fd)
        return True

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, object], *fds: int) -> None:
        # If the client is gone, the next read sees the closed socket.
        with suppress(OSError):
            socket.send_fds(self._requests, [json.dumps(message).encode()], fds)

    def _become(self, arguments: list[str], environment: dict[str, str], output_fd: int) -> NoReturn:
        """In the fork: behave like a new process of that command, and exit like it."""
        status = 1
        try:
            _die_with(os.getppid())
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            _redirect_output(output_fd)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[:] = ["evertick", *arguments]
            _name(" ".join(arguments))
            status = self._main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(status)


def _redirect_output(output_fd: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output_fd, 1)
    # Close the fork server's socket and the descriptors of the other services.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _name(name: str) -> None:
    """The name that `ps` shows. Without the setting, the module would overwrite the environment that identifies our
    processes."""
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle  # imported here: it reads the line above once

    setproctitle(f"evertick {name}")


_LONGEST_LINE = 1024 * 1024


_LONGEST_ANSWER_SECONDS = 5.0


class _ForkedProcess:
    """A service that the fork server forked. The fork server is its parent and reports how it ended."""

    def __init__(self, pid: int, pidfd: int, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdout, self._pidfd = pid, stdout, pidfd
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def send_signal(self, number: int, /) -> None:
        if not self._code.done():
            send_signal(self._pidfd, signal.Signals(number))

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
            asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # another thread reaped it first: only the fact that it ended is known
            self.ended(-signal.SIGKILL)
        else:
            self.ended(os.waitstatus_to_exitcode(status))


# A service's process, as the supervisor needs it.
ServiceProcess = Process | _ForkedProcess


class _ForkRequest(NamedTuple):
    answer: asyncio.Future[_ForkedProcess | None]
    stream: asyncio.StreamReader


class ServiceForkServer:
    """Requests services. Without a fork server, or after it died, they are started as ordinary processes."""

    def __init__(self, main: Main | None = None) -> None:
        self._numbers = itertools.count()
        self._asked: dict[int, _ForkRequest] = {}
        self._forked: dict[int, _ForkedProcess] = {}
        self._socket: socket.socket | None = None
        self.pid: int | None = None
        self.lost: Callable[[], None] = lambda: None
        if main is not None and not IS_PORTABLE:
            with suppress(OSError):
                self._open(main)

    def _open(self, main: Main) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for side in (ours, theirs):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_MESSAGE)
        ours.setblocking(False)
        # Objects that exist now are never garbage: a collection would only write to their pages, and each write copies
        # a page.
        gc.collect()
        gc.freeze()
        parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            serve(theirs, main, parent_pid)
        theirs.close()
        self._socket = ours

    async def start(
        self, arguments: list[str], environment: Mapping[str, str], stdin: int | None = None
    ) -> ServiceProcess:
        """Run `evertick ARGUMENTS` with this environment and its output in a pipe; it dies with this process.

        A service that gets a port as its standard input has its own interpreter: it imports libraries that no other
        service needs.
        """
        if self._socket is not None and stdin is None:
            forked = await self._fork(self._socket, arguments, environment)
            if forked is not None:
                return forked
        return await asyncio.create_subprocess_exec(
            *tied_to_this_process([sys.executable, "-m", "evertick.cli.main", *arguments]),
            env=dict(environment),
            stdout=PIPE,
            stdin=DEVNULL if stdin is None else stdin,
            limit=_LONGEST_LINE,
            preexec_fn=partial(_die_with, os.getpid()),
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

    async def _fork(
        self, to: socket.socket, arguments: list[str], environment: Mapping[str, str]
    ) -> _ForkedProcess | None:
        loop = asyncio.get_running_loop()
        loop.add_reader(to, self._receive_ends)
        stream = asyncio.StreamReader(limit=_LONGEST_LINE)
        reading, writing = os.pipe()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", buffering=0)
        )
        number, asked = next(self._numbers), _ForkRequest(loop.create_future(), stream)
        request = {"number": number, "arguments": arguments, "environment": dict(environment)}
        self._asked[number] = asked
        try:
            socket.send_fds(to, [json.dumps(request).encode()], [writing])
            async with asyncio.timeout(_LONGEST_ANSWER_SECONDS):
                forked = await asked.answer
        except (OSError, TimeoutError):  # it is gone or hangs, or the environment exceeds the message size
            forked = None
        finally:
            os.close(writing)
        if forked is None:
            pipe.close()
        return forked

    def _receive_ends(self) -> None:
        assert self._socket is not None
        try:
            text, fds, _flags, _address = socket.recv_fds(self._socket, LONGEST_MESSAGE, 1)
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

    def _born(self, asked: _ForkRequest, pid: int, pidfd: int) -> None:
        forked = self._forked[pid] = _ForkedProcess(pid, pidfd, asked.stream)
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


def _die_with(parent_pid: int) -> None:
    """In the child before exec: an orphaned service would hold the home and the leases of a dead installation."""
    os.setpgid(0, 0)
    die_with_parent(signal.SIGTERM, parent_pid)
