"""Where this process runs, so that another process can prove that it is gone. Does not use the database: agents report
it, too."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from evertick.execution.proc_stat import START_TICKS, boot_id, stat_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process runs. Two processes with the same place see each other's pids and start times."""

    host: str
    boot_id: str
    pid_namespace: str
    uid: int


def here() -> Place:
    # A start time counts from boot as the time namespace shows it, and a user id means another user in another user
    # namespace; so both must be equal, too.
    namespaces = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time", "user")]
    return Place(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=" ".join(str(each.readlink()) for each in namespaces if each.is_symlink()),
        uid=os.geteuid(),
    )


def agent_place() -> dict[str, object]:
    """The place, as an agent reports it."""
    return {**asdict(here()), "pid": os.getpid(), "pid_started": float(stat_of("self")[START_TICKS])}


def process_name() -> str:
    """A name that no other running process has."""
    return f"{socket.gethostname()}-{os.getpid()}"
