"""The few Linux calls that Python's library lacks, and facts of `/proc`.

Never raises where the call is only a precaution.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


_PR_SET_CHILD_SUBREAPER = 36


_SIG_SETMASK = 2


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


def boot_seconds() -> float:
    """Seconds since the machine was started, including suspend; the same in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def die_with_parent(death_signal: int, parent_pid: int) -> None:
    """Have `death_signal` sent when the parent dies. Ends this process now if the parent is already gone."""
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent_pid:
        os._exit(0)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that a double fork cannot leave this process's tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Free the disk blocks of a file's range. The file keeps its size; not every file system supports this."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)


def fd_ranges(fds: list[int]) -> list[tuple[int, int]]:
    """Descriptors as ranges, each from its first to after its last: closing many at once costs a child as much as
    closing one."""
    ranges: list[tuple[int, int]] = []
    for fd in sorted(fds):
        if ranges and ranges[-1][1] == fd:
            ranges[-1] = ranges[-1][0], fd + 1
        else:
            ranges.append((fd, fd + 1))
    return ranges


# Fields of /proc/<pid>/stat, counted after the command's closing bracket.
STATE, SESSION, START_TICKS = 0, 3, 19


def stat_of(which: str) -> list[str]:
    """The fields for a pid or `self`. OSError if there is no such process."""
    return Path(f"/proc/{which}/stat").read_text().rpartition(")")[2].split()


def boot_id() -> str:
    """A start time counts from boot: it distinguishes two processes only within the same boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def forget_variable(name: str) -> None:
    """Remove a variable from the environment, and from the memory that `/proc` shows of this process and of its forks."""
    os.environ.pop(name, None)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, the 50th and 51st of all fields
    entries = ctypes.string_at(start, end - start).split(b"\0")
    for place, entry in enumerate(entries):
        if entry.startswith(name.encode() + b"="):
            ctypes.memset(start + sum(len(each) + 1 for each in entries[:place]), 0, len(entry))
