"""The identity of this process on this machine, so that another process can prove that it is gone."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from evertick.config import Settings
from evertick.execution.proc_stat import START_TICKS, STATE, stat_of
from evertick.services.place import Place, here
from evertick.store.runners import LiveRunner, NewRunner


def pid_started(pid: int) -> float:
    """When that process started, in the kernel's ticks. OSError if there is none."""
    return float(stat_of(str(pid))[START_TICKS])


def new_runner(session: int, settings: Settings, *, request: str | None = None) -> NewRunner:
    place, pid = here(), os.getpid()
    return NewRunner(
        session=session,
        runner_id=settings.runner_id or f"{place.host}-{pid}",
        name=settings.runner_name,
        version=version("evertick"),
        host=place.host,
        boot_id=place.boot_id,
        pid_namespace=place.pid_namespace,
        uid=place.uid,
        pid=pid,
        pid_started=float(stat_of("self")[START_TICKS]),
        queues=list(settings.runner_queues),
        match=list(settings.runner_match),
        slots=settings.runner_slots,
        request=request,
        lost_after_seconds=settings.lost_after_seconds,
        executor=settings.executor,
    )


def is_provably_gone(runner: LiveRunner, place: Place) -> bool:
    """True only for a process of this very place whose pid and start time are gone (V5). `place` is this process's
    place.

    Host names count, too: a copy of a virtual machine has the same boot id. And where other users' processes are
    hidden, only root and their own user can prove that one is gone.
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
