"""CPU time and memory of an attempt, as the operating system counts them for a process and the children that it waited for.

Called twice in every attempt, so it may do no more than a few system calls.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage, struct_rusage

from evertick.domain.attempt import Usage

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
# Writing this resets the peak of the process's memory; see proc(5).
_RESET_PEAK = b"5"
_CGROUP = Path("/sys/fs/cgroup")


def begin_usage(*, is_reused: bool) -> tuple[float, int]:
    """Where the counts stand before an attempt: the CPU seconds so far, and the peak memory of children so far.
    `is_reused`: the process ran other attempts, whose peak must not count."""
    if is_reused:
        with suppress(OSError):
            _reset_peak()
    own, waited_for = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    return _cpu_seconds(own) + _cpu_seconds(waited_for), waited_for.ru_maxrss


def usage_since(begun: tuple[float, int]) -> Usage:
    own, waited_for = getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN)
    cpu_seconds = _cpu_seconds(own) + _cpu_seconds(waited_for) - begun[0]
    peak = own.ru_maxrss
    # Of children, only a new peak is known to be of this attempt.
    if waited_for.ru_maxrss > begun[1]:
        peak = max(peak, waited_for.ru_maxrss)
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
