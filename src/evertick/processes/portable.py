"""The calls of `linux.py` for every other system, such as macOS: for development, not for production.

Slower, because processes are searched instead of listed by the kernel, and with one promise less: nothing adopts orphans
or ends a process with its parent. Descendants are found by their session (each attempt leads one) and by their mark.
"""

from __future__ import annotations

import array
import errno
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

IS_PORTABLE = True
# No descriptor is readable when a child has died.
CHILD_POLL_MS = 20
_POLL_SECONDS = 0.01
_PARENT_SECONDS = 0.25
_HEADER = struct.Struct("!I")


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except psutil.NoSuchProcess as error:  # a zombie, too
        raise ProcessLookupError(str(error)) from None
    except psutil.AccessDenied as error:
        raise PermissionError(str(error)) from None


def become_session_leader() -> None:
    with suppress(PermissionError):
        os.setsid()


def boot_seconds() -> float:
    # Of macOS this clock includes suspend; `time.monotonic()` does not.
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def die_with_parent(death_signal: int, parent_pid: int) -> None:
    """Only the check: nothing tells a process later that its parent has died. Who needs that asks again."""
    if os.getppid() != parent_pid:
        os._exit(0)


def tied_to_this_process(command: list[str]) -> list[str]:
    program, flag, *module = command
    return [program, flag, __name__, str(os.getpid()), *module]


def _run_tied(parent_pid: int, module: str, arguments: list[str]) -> None:
    """Run a module of Python, and ask it to stop when the parent has died."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_sibling() -> int:
    raise OSError(errno.ENOSYS, "this system forks no siblings")


def become_subreaper() -> None:
    pass


def use_huge_pages() -> None:
    pass


def adopted(ended_sessions: Collection[int]) -> list[int]:
    return [pid for pid in all_pids() if _session_of(pid) in ended_sessions] if ended_sessions else []


def left_behind(token: str) -> list[int]:
    wanted, found = token.encode(), []
    for pid in all_pids():
        with suppress(OSError):
            if pid != os.getpid() and (wanted in command_line(pid) or wanted in first_environment(pid)):
                found.append(pid)
    return found


def expect_children() -> None:
    # Here a signal whose default is to be ignored is dropped even while it is blocked.
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)


def reap_any() -> int:
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return -1


SignalMask = frozenset[signal.Signals]


def signal_fd(signums: set[signal.Signals]) -> int:
    """Never readable: see CHILD_POLL_MS. Its writing end stays open."""
    return os.pipe()[0]


def block_signals(mask: SignalMask) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def signal_mask(signums: set[signal.Signals]) -> SignalMask:
    return frozenset(signums)


class MessageSocket:
    """Messages over a stream: each is preceded by its length, and its descriptors travel with that. Once a message has
    begun, the rest of it is waited for."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    def setblocking(self, flag: bool, /) -> None:
        self._stream.setblocking(flag)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> MessageSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: bytes, fds: Collection[int] = ()) -> int:
        """BlockingIOError if it would have to wait before the first byte."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        left = memoryview(_HEADER.pack(len(message)) + message)
        left = left[self._stream.sendmsg([left], rights) :]
        while left:
            select.select([], [self._stream], [])
            with suppress(BlockingIOError):
                left = left[self._stream.send(left) :]
        return len(message)

    def recv(self, most_bytes: int, flags: int = 0) -> bytes:
        return self.receive(0, flags)[0]

    def receive(self, most_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
        """The next message; an empty one at the end. BlockingIOError if there is none yet."""
        room = socket.CMSG_SPACE(most_fds * array.array("i").itemsize) if most_fds else 0
        head, rights, *_ = self._stream.recvmsg(_HEADER.size, room, flags)
        fds = array.array("i")
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if head and (head := head + self._exactly(_HEADER.size - len(head))) and len(head) == _HEADER.size:
            return self._exactly(_HEADER.unpack(head)[0]), list(fds)
        return b"", list(fds)

    def _exactly(self, size: int) -> bytes:
        """Fewer only if the other end is gone."""
        received = b""
        while len(received) < size:
            select.select([self._stream], [], [])
            with suppress(BlockingIOError):
                part = self._stream.recv(size - len(received))
                if not part:
                    break
                received += part
        return received


def message_pair() -> tuple[MessageSocket, MessageSocket]:
    ours, theirs = socket.socketpair()
    return MessageSocket(ours), MessageSocket(theirs)


def message_socket(fd: int) -> MessageSocket:
    return MessageSocket(socket.socket(fileno=fd))


def send_fds(to: MessageSocket, messages: list[bytes], fds: Collection[int]) -> int:
    return to.send(b"".join(messages), fds)


def recv_fds(source: MessageSocket, most_bytes: int, most_fds: int) -> tuple[bytes, list[int], int, None]:
    return *source.receive(most_fds), 0, None


def punch_hole(fd: int, offset: int, length: int) -> None:
    pass


class ProcessFacts(NamedTuple):
    parent: int
    session: int
    started: float
    has_ended: bool


def facts_of(pid: int) -> ProcessFacts:
    with _as_os_errors():
        process = psutil.Process(pid)
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return ProcessFacts(process.ppid(), os.getsid(pid), process.create_time(), has_ended)


@cache
def boot_id() -> str:
    with suppress(OSError):
        asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    return str(psutil.boot_time())


def namespaces() -> str:
    return ""


def sees_own_pids() -> bool:
    return True


def forget_variable(name: str) -> None:
    os.environ.pop(name, None)


Pin = Any


def pin(pid: int) -> Pin:
    """Signals are sent only if the start time is still the same."""
    with _as_os_errors():
        return psutil.Process(pid)


def unpin(pinned: Pin) -> None:
    pass


def send_signal(pinned: Pin, signum: signal.Signals) -> None:
    with _as_os_errors():
        pinned.send_signal(signum)


def exit_fd(pid: int) -> int:
    process = pin(pid)
    reading, writing = os.pipe()

    def wait() -> None:
        with suppress(psutil.Error):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_POLL_SECONDS)
        os.close(writing)

    threading.Thread(target=wait, daemon=True).start()
    return reading


def all_pids() -> list[int]:
    return list(psutil.pids())


def command_line(pid: int) -> bytes:
    with _as_os_errors():
        return b"".join(os.fsencode(each) + b"\0" for each in psutil.Process(pid).cmdline())


def first_environment(pid: int) -> bytes:
    with _as_os_errors():
        variables = psutil.Process(pid).environ()
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())


def children_of(pid: int) -> list[int]:
    """With the members of the session that it leads: an orphan has another parent, but the same session."""
    return [other for other in all_pids() if other != pid and pid in owners_of(other)]


def owners_of(pid: int) -> set[int]:
    with suppress(OSError), _as_os_errors():
        return {psutil.Process(pid).ppid(), _session_of(pid)}
    return set()


def _session_of(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return -1


def native_threads() -> dict[int, str]:
    known = {thread.native_id or 0: thread.name for thread in threading.enumerate()}
    others = int(psutil.Process().num_threads()) - len(known)
    return known | {-number: "of an extension" for number in range(1, others + 1)}


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    _run_tied(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
