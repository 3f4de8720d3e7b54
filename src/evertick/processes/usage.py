"""CPU time and memory of an attempt, as the operating system counts them for a process and the children that it waited for.

Called twice in every attempt, so it may do no more than a few system calls.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage, struct_rusage
from time import process_time

from evertick.domain.attempt import Usage

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
# Writing this resets the peak of the process's memory; see proc(5).
_RESET_PEAK = b"5"
_LEFT_BYTES = 1024 * 1024
_CGROUP = Path("/sys/fs/cgroup")


class UsageMeter:
    """Counts the attempts of one process, one after the other."""

    def __init__(self) -> None:
        self._began = 0.0
        self._peak_before: int | None = None  # the process's peak when its count last began
        self._peak = 0
        self._children_seconds, self._peak_of_children = 0.0, 0

    def begin(self) -> None:
        # The peak of an earlier attempt must not count. Resetting it costs 20 us, so a smaller one is left.
        if self._peak_before is None:
            self._peak_before = getrusage(RUSAGE_SELF).ru_maxrss
        elif (self._peak - self._peak_before) * _RSS_UNIT > _LEFT_BYTES:
            with suppress(OSError):
                _reset_peak()
            self._peak_before = getrusage(RUSAGE_SELF).ru_maxrss
        self._began = process_time()

    def end(self) -> Usage:
        cpu_seconds = process_time() - self._began
        self._peak = peak = getrusage(RUSAGE_SELF).ru_maxrss
        waited_for = getrusage(RUSAGE_CHILDREN)
        of_children = _cpu_seconds(waited_for)
        cpu_seconds += of_children - self._children_seconds
        # Of children, only a new peak is known to be of this attempt.
        if waited_for.ru_maxrss > self._peak_of_children:
            peak = max(peak, waited_for.ru_maxrss)
        self._children_seconds, self._peak_of_children = of_children, waited_for.ru_maxrss
        return Usage(round(cpu_seconds, 6), peak * _RSS_UNIT)


def usage_of(dead: struct_rusage) -> Usage:
    """Of a process that was reaped."""
    return Usage(round(_cpu_seconds(dead), 6), dead.ru_maxrss * _RSS_UNIT)


def container_peak_bytes() -> int | None:
    """The peak memory of the container that this process is in, which its limit applies to; None outside of one."""
    try:
        if Path("/proc/self/cgroup").read_text().strip() != "0::/":
            return None
        return int((_CGROUP / "memory.peak").read_text())
    except (OSError, ValueError):
        return None


def _cpu_seconds(used: struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def _reset_peak() -> None:
    fd = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, _RESET_PEAK)
    finally:
        os.close(fd)
