"""The few Linux calls that Python's library lacks. Never raises where the call is only a precaution."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def die_with_parent(death_signal: signal.Signals, parent_pid: int) -> None:
    """Be sent `death_signal` when the parent dies. Ends this process now if the parent is already gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that a double fork cannot leave this process's tree."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the blocks of a file's range back to the disk. The file keeps its size; not every file system can."""
    _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, length)
