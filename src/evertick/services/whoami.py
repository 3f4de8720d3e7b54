"""The identity of this process on this machine, so that another process can prove that it is gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from evertick.execution.proc_stat import START_TICKS, STATE, stat_of
from evertick.services.place import Place


def pid_started(pid: int) -> float:
    """When the process started, in kernel ticks. Raises OSError if it does not exist."""
    return float(stat_of(str(pid))[START_TICKS])


class RecordedProcess(Protocol):
    """A process as recorded in the database."""

    @property
    def host(self) -> str: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def pid_namespace(self) -> str: ...
    @property
    def uid(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def pid_started(self) -> float: ...


def is_provably_gone(runner: RecordedProcess, place: Place) -> bool:
    """True only for a process of this very place (`place`) whose pid and start time no longer exist (V5).

    Host names count, too: a copy of a virtual machine has the same boot id. Where other users' processes are hidden, only
    root and the process's own user can prove that it is gone.
    """
    if (runner.host, runner.boot_id, runner.pid_namespace) != (place.host, place.boot_id, place.pid_namespace):
        return False
    if place.uid not in (0, runner.uid) or not _sees_its_own_pids():
        return False
    try:
        stat = stat_of(str(runner.pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    return float(stat[START_TICKS]) != runner.pid_started or stat[STATE] in ("Z", "X")


def _sees_its_own_pids() -> bool:
    """In a new PID namespace /proc may still show the parent's, in which our pids belong to other processes."""
    return Path("/proc/self").readlink().name == str(os.getpid())
