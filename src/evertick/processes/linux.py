"""The calls of Linux that a process tree needs, and facts of `/proc`. `portable.py` has the same for other systems.

Import them from `system`. Never raises where the call is only a precaution.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

IS_PORTABLE = False
# How long a fork server may sleep: the death of a child wakes it.
CHILD_POLL_MS = 1000

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIG_SETMASK = 2
_CLONE_PARENT = 0x8000
# The number of the system call `clone`, whose first argument are the flags on these machines.
_CLONE_CALLS = {"x86_64": 56, "aarch64": 220}
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

# Called by every fresh process, where each page that a call touches is copied (2 µs). So: resolved once, without
# declared types (plain ints and pointers need none), and without releasing the interpreter lock, which only slow calls
# must.
_libc = ctypes.PyDLL(None)
_prctl, _setsid, _sigprocmask, _waitpid = _libc.prctl, _libc.setsid, _libc.sigprocmask, _libc.waitpid
_fallocate = ctypes.CDLL(None).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_WNOHANG = os.WNOHANG


def become_session_leader() -> None:
    """Become the leader of a session and a process group; a no-op if it is one already."""
    _setsid()


def fork_sibling() -> int:
    """Fork a process that is a child of this process's parent, as `os.fork` forks one of this process. Python's hooks run, those
    of C libraries do not: only for a process with one thread. OSError where the machine has no such call."""
    call = _CLONE_CALLS.get(os.uname().machine)
    if call is None:
        raise OSError(errno.ENOSYS, f"no call for siblings is known for {os.uname().machine}")
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(call, _CLONE_PARENT | int(signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(errno.EAGAIN, "no process can be forked")
    return pid


def boot_seconds() -> float:
    """Seconds since the machine was started, including suspend; the same in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def die_with_parent(death_signal: int, parent_pid: int) -> None:
    """Have `death_signal` sent when the parent dies. Ends this process now if the parent is already gone."""
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent_pid:
        os._exit(0)


def tied_to_this_process(command: list[str]) -> list[str]:
    """The command that runs a module of Python no longer than this process lives. Here `die_with_parent` before its start
    is enough."""
    return command


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that a double fork cannot leave this process's tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def adopted(ended_sessions: Collection[int]) -> list[int]:
    """Orphans of this process's tree. A subreaper has them as children, whatever session they were in."""
    return children_of(os.getpid())


def left_behind(token: str) -> list[int]:
    """The processes of a fork server that has ended, with this mark. They are this subreaper's children."""
    return children_of(os.getpid())


def expect_children() -> None:
    """Before `sigwait` for SIGCHLD. Linux keeps a blocked signal even if its default is to be ignored."""


def reap_any() -> int:
    """Reap a child that has ended: its pid, 0 if none has, -1 if there is no child. Python's call would raise for that."""
    return int(_waitpid(-1, None, _WNOHANG))


def signal_fd(signums: set[signal.Signals]) -> int:
    """A descriptor that is readable when one of these signals is pending. They must be blocked."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    return int(_libc.signalfd(-1, ctypes.byref(signal_mask(signums)), flags))


def block_signals(mask: SignalMask) -> None:
    """Block these signals and no others. Python's own call would create enums: 30 µs in a freshly forked process."""
    _sigprocmask(_SIG_SETMASK, mask, None)


def signal_mask(signums: set[signal.Signals]) -> SignalMask:
    """glibc's sigset_t: 1,024 bits."""
    return (ctypes.c_uint64 * 16)(sum(1 << (signum - 1) for signum in signums))


SignalMask = ctypes.Array[ctypes.c_uint64]
MessageSocket = socket.socket
send_fds, recv_fds = socket.send_fds, socket.recv_fds


def message_pair() -> tuple[MessageSocket, MessageSocket]:
    """Two ends of a connection that keeps messages apart, and carries descriptors with them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def message_socket(fd: int) -> MessageSocket:
    return socket.socket(fileno=fd)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the disk blocks of a file's range. The file keeps its size; not every file system supports this."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)


class ProcessFacts(NamedTuple):
    parent: int
    session: int
    # In kernel ticks since boot.
    started: float
    # A zombie has ended, too.
    has_ended: bool


def facts_of(pid: int) -> ProcessFacts:
    """OSError if there is no such process."""
    # The fields after the command, which is in brackets.
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessFacts(int(stat[1]), int(stat[3]), float(stat[19]), stat[0] in ("Z", "X"))


def boot_id() -> str:
    """A start time counts from boot: it distinguishes two processes only within the same boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespaces() -> str:
    """A start time counts from boot as the time namespace shows it, and a user id means another user in another user
    namespace; so processes compare both, too."""
    found = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time", "user")]
    return " ".join(str(each.readlink()) for each in found if each.is_symlink())


def sees_own_pids() -> bool:
    """In a new PID namespace /proc may still show the parent's, in which our pids belong to other processes."""
    return Path("/proc/self").readlink().name == str(os.getpid())


def forget_variable(name: str) -> None:
    """Remove a variable from the environment, and from the memory that `/proc` shows of this process and of its forks."""
    os.environ.pop(name, None)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, the 50th and 51st of all fields
    entries = ctypes.string_at(start, end - start).split(b"\0")
    for place, entry in enumerate(entries):
        if entry.startswith(name.encode() + b"="):
            ctypes.memset(start + sum(len(each) + 1 for each in entries[:place]), 0, len(entry))


Pin = int


def pin(pid: int) -> Pin:
    """A hold on the process that now has this pid: signals sent to it reach no later process. OSError if there is none."""
    return os.pidfd_open(pid)


def unpin(pinned: Pin) -> None:
    os.close(pinned)


def send_signal(pinned: Pin, signum: signal.Signals) -> None:
    """OSError if it has ended."""
    signal.pidfd_send_signal(pinned, signum)


def exit_fd(pid: int) -> int:
    """A descriptor that is readable when the process has ended. It must be closed. OSError if there is no such process."""
    return os.pidfd_open(pid)


def all_pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def command_line(pid: int) -> bytes:
    """The arguments, each with a null after it. OSError if there is no such process."""
    return _read(f"/proc/{pid}/cmdline")


def first_environment(pid: int) -> bytes:
    """The environment with which it was started. OSError if it cannot be read."""
    return _read(f"/proc/{pid}/environ")


def children_of(pid: int) -> list[int]:
    """The direct children of a process, of all its threads. Empty when it is gone."""
    found: list[int] = []
    try:
        with os.scandir(f"/proc/{pid}/task") as threads:
            for thread in threads:
                found += map(int, _read(f"{thread.path}/children").split())
    except FileNotFoundError:
        # Either the thread has just ended, or the kernel was built without CONFIG_PROC_CHILDREN.
        return [other for other in all_pids() if pid in owners_of(other)]
    except OSError:
        return found
    return found


def owners_of(pid: int) -> set[int]:
    """The processes to whose tree it belongs directly: its parent. Empty when it is gone."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return set()
    return {int(stat[stat.rindex(b")") + 1 :].split()[1])}


def native_threads() -> dict[int, str]:
    """The threads of this process, with those that Python does not know, by their native id."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found[int(thread.name)] = (thread / "comm").read_text().strip()
    return found


def resident_bytes() -> int:
    return int(_read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> bytes:
    """Plain descriptors: 7 µs against 19 µs for a buffered file object, and a fork server reads one per ended child."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


_HUGE_PAGE = 2 * 1024 * 1024
_MADV_COLLAPSE = 25


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages. A fork and an exit go page by page: with 100 MiB they then take 1.5 ms less.
    An older kernel refuses it, and nothing changes."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *_ = line.split()
        start, end = (int(each, 16) for each in place.split("-"))
        first, last = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if access == "rw-p" and inode == "0" and last > first:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
