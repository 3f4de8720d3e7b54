"""The identity of a process: where it runs, so that another process on the machine can prove that it is gone.

Does not use the database: agents report it, too. A process that cannot be seen is never called gone (V5).
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from evertick.processes.system import boot_id, facts_of, namespaces, sees_own_pids


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """Where this process runs. Two processes with the same place see each other's pids and start times."""

    host: str
    boot_id: str
    pid_namespace: str
    uid: int


def this_process() -> ProcessPlace:
    return ProcessPlace(host=socket.gethostname(), boot_id=boot_id(), pid_namespace=namespaces(), uid=os.geteuid())


def registered_place() -> dict[str, Any]:
    """The fields of this process with which a runner or an agent is registered."""
    return {**asdict(this_process()), "pid": os.getpid(), "pid_started": pid_started(os.getpid())}


def process_name() -> str:
    """A name that no other running process has."""
    return f"{socket.gethostname()}-{os.getpid()}"


def pid_started(pid: int) -> float:
    """When the process started, comparable within one boot. Raises OSError if it does not exist."""
    return facts_of(pid).started


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


def is_provably_gone(runner: RecordedProcess, place: ProcessPlace) -> bool:
    """True only for a process of this very place (`place`) whose pid and start time no longer exist (V5).

    Host names count, too: a copy of a virtual machine has the same boot id. Where other users' processes are hidden, only
    root and the process's own user can prove that it is gone.
    """
    if (runner.host, runner.boot_id, runner.pid_namespace) != (place.host, place.boot_id, place.pid_namespace):
        return False
    if place.uid not in (0, runner.uid) or not sees_own_pids():
        return False
    try:
        facts = facts_of(runner.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return facts.started != runner.pid_started or facts.has_ended
