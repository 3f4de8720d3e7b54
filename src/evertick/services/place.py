"""Where this process is, so that somebody else can prove that it is gone. Knows no database: agents tell it, too."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from evertick.execution.proc_stat import START_TICKS, boot_id, stat_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process is. Two that are at the same place see each other's pids and start times."""

    host: str
    boot_id: str
    pid_namespace: str
    uid: int


def here() -> Place:
    # A start time is counted from the boot as the time namespace has it, and a user is somebody else in another user
    # namespace; so those must be the same, too.
    namespaces = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time", "user")]
    return Place(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=" ".join(str(each.readlink()) for each in namespaces if each.is_symlink()),
        uid=os.geteuid(),
    )


def agent_place() -> dict[str, object]:
    """As an agent tells it."""
    return {**asdict(here()), "pid": os.getpid(), "pid_started": float(stat_of("self")[START_TICKS])}


def process_name() -> str:
    """What tells this process from all others that run now."""
    return f"{socket.gethostname()}-{os.getpid()}"
