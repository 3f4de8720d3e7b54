"""Explains why a process ended that could not report it: distinguishes exit code, signal and out of memory."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

OUT_OF_MEMORY = "out of memory"


class Exit(NamedTuple):
    reason: str
    exit_code: int


def explain_exit(wait_status: int, *, has_oom_evidence: bool, is_shell: bool = False) -> Exit:
    """The reason for a process that is gone. A signal's exit code is its negative number, as in `subprocess`."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code < 0:
        return Exit(_by_signal(-code, has_oom_evidence), code)
    if is_shell and code > 128 and (name := _signal_name(code - 128)):
        detail = f"; {OUT_OF_MEMORY}" if has_oom_evidence and code == 128 + signal.SIGKILL else ""
        return Exit(f"exited with code {code} (a command in it was killed by {name}{detail})", code)
    return Exit(f"exited with code {code}", code)


def _by_signal(number: int, has_oom_evidence: bool) -> str:
    name = _signal_name(number) or f"signal {number}"
    if number != signal.SIGKILL:
        return f"killed by {name}"
    if has_oom_evidence:
        return f"{OUT_OF_MEMORY}: killed by {name} (the kernel's out-of-memory killer ran)"
    return f"killed by {name} (possibly {OUT_OF_MEMORY})"


def _signal_name(number: int) -> str | None:
    with suppress(ValueError):
        return signal.Signals(number).name
    return None


class OomEvidence:
    """Watches the kernel's counters of out-of-memory kills, of our cgroup and of the machine."""

    def __init__(self, sources: list[Path]) -> None:
        self._sources = sources
        self._seen = self._count()

    def has_new(self) -> bool:
        """Whether the killer ran since the previous call."""
        seen, self._seen = self._seen, self._count()
        return self._seen > seen

    def _count(self) -> int:
        return sum(_oom_kills(source) for source in self._sources)


def oom_counters() -> list[Path]:
    """The files in which the kernel counts such kills: for our cgroup, of either version; without one, for the machine."""
    sources = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                sources.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
            elif "memory" in controllers.split(","):
                sources.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return [source for source in sources if source.exists()] or [Path("/proc/vmstat")]


def _oom_kills(source: Path) -> int:
    with suppress(OSError, ValueError):
        for line in source.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
