"""The fork server: a process that has imported every service and forks one on request, so that they share that memory.

Forked by `evertick up` before it has any thread. Never runs a service itself and never outlives `up`: when it dies, the
services it forked shut down gracefully, as if `up` had died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from evertick.execution.linux import die_with_parent

# A request contains a service's whole environment.
LONGEST_MESSAGE = 4 * 1024 * 1024
Main = Callable[[list[str]], int]
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def live(requests: socket.socket, main: Main, parent_pid: int) -> NoReturn:
    """Fork services on request and report how each ended, until the client closes the socket."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL, parent_pid)
        # Ctrl-C in a terminal is meant for `up`, which then stops the services in order.
        for number in _DEAF_TO:
            signal.signal(number, signal.SIG_IGN)
        _name("nursery")
        _Nursery(requests, main).serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class _Nursery:
    def __init__(self, requests: socket.socket, main: Main) -> None:
        self._requests, self._main = requests, main
        self._pids: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def serve(self) -> None:
        while True:
            for fd, _event in self._poll.poll():
                if fd != self._requests.fileno():
                    self._bury(fd)
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
            pidfd = os.pidfd_open(pid)
            self._pids[pidfd] = pid
            self._poll.register(pidfd, select.POLLIN)
            self._say({"number": asked["number"], "pid": pid}, pidfd)
        for fd in fds:
            os.close(fd)
        return True

    def _bury(self, pidfd: int) -> None:
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
            nursery_pid = os.getppid()
            os.setpgid(0, 0)
            die_with_parent(signal.SIGTERM, nursery_pid)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            _take_output(output_fd)
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


def _take_output(output_fd: int) -> None:
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
