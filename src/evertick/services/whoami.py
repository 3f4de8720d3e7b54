"""What identifies this process on this machine, so that somebody else can prove that it is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from evertick.store.runners import LiveRunner, NewRunner


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "none"


def new_runner(session: int, runner_id: str | None, queues: Iterable[str], slots: int) -> NewRunner:
    pid = os.getpid()
    return NewRunner(
        session=session,
        runner_id=runner_id or f"{socket.gethostname()}-{pid}",
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=pid,
        pid_started=psutil.Process(pid).create_time(),
        queues=list(queues),
        slots=slots,
    )


def is_provably_gone(runner: LiveRunner) -> bool:
    """True only for a process of this very machine and PID namespace whose pid and start time are gone (V5)."""
    if (runner.boot_id, runner.pid_namespace) != (boot_id(), pid_namespace()):
        return False
    try:
        process = psutil.Process(runner.pid)
        return abs(process.create_time() - runner.pid_started) > 0.02 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
