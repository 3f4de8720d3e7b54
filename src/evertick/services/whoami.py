"""What identifies this process on this machine, so that somebody else can prove that it is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from evertick.store.runners import LiveRunner, NewRunner

_STATE, _START_TICKS = 0, 19  # fields of /proc/<pid>/stat, counted after the command's closing bracket


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def new_runner(session: int, runner_id: str | None, queues: Iterable[str], slots: int) -> NewRunner:
    pid = os.getpid()
    return NewRunner(
        session=session,
        runner_id=runner_id or f"{socket.gethostname()}-{pid}",
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=pid,
        pid_started=float(_stat(pid)[_START_TICKS]),
        queues=list(queues),
        slots=slots,
    )


def is_provably_gone(runner: LiveRunner) -> bool:
    """True only for a process of this very machine and PID namespace whose pid and start time are gone (V5)."""
    if (runner.boot_id, runner.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    try:
        stat = _stat(runner.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return float(stat[_START_TICKS]) != runner.pid_started or stat[_STATE] in ("Z", "X")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
