"""A process tree: kills it, finds the orphans of a dead runner, and explains how a process ended.

A tree is frozen before it is killed, so that no process escapes by forking. Never signals a pid it has not verified.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from evertick.domain.attempt import FORK_SERVER_MARK, session_text
from evertick.processes.system import (
    Pin,
    all_pids,
    children_of,
    command_line,
    first_environment,
    owners_of,
    pin,
    send_signal,
    unpin,
)


def kill_tree(root: int) -> None:
    """Kill a process and every descendant."""
    members = _freeze(root)
    try:
        for pid in reversed(members):
            _send(members[pid], signal.SIGKILL)
    finally:
        for pinned in members.values():
            unpin(pinned)


def find_by_token(token: str) -> list[int]:
    """Every process whose command line or initial environment contains the token: what a killed fork server left
    behind."""
    wanted = token.encode()
    found = []
    for pid in all_pids():
        with suppress(OSError):
            if wanted in command_line(pid) or wanted in first_environment(pid):
                found.append(pid)
    return found


def _freeze(root: int) -> dict[int, Pin]:
    """Stop the tree from the root down until a whole pass finds no new process. Parents are first."""
    members: dict[int, Pin] = {}
    _adopt(root, members)
    before = -1
    while before != len(members):
        before = len(members)
        for pid in list(members):
            for child in children_of(pid):
                if child not in members:
                    _adopt(child, members)
    return members


def _adopt(pid: int, members: dict[int, Pin]) -> None:
    """Pin a process before checking it: the pid may have been reused since it was listed. Then stop it."""
    try:
        pinned = pin(pid)
    except OSError:
        return
    if members and not owners_of(pid) & {*members, os.getpid()}:
        unpin(pinned)
        return
    members[pid] = pinned
    _send(pinned, signal.SIGSTOP)


def _send(pinned: Pin, signum: signal.Signals) -> None:
    with suppress(OSError):
        send_signal(pinned, signum)


_PAUSE_SECONDS = 0.01


def kill_orphans(session: int, *, within_seconds: float) -> bool:
    """Whether no process of that session is left. Its fork servers exit by themselves; the rest is killed."""
    give_up_at = time.monotonic() + within_seconds
    while strays := find_orphans(session):
        if time.monotonic() > give_up_at:
            return False
        for pid in strays:
            kill_tree(pid)
        time.sleep(_PAUSE_SECONDS)
    return True


def find_orphans(session: int) -> list[int]:
    """Processes of that session's attempts. One that ran another program is known by its environment."""
    name = session_text(session).encode()
    marks = (
        (command_line, re.compile(rb"evertick\.attempts\.fork_server_main\0.*/" + name + rb"/", re.S)),
        (first_environment, re.compile(rb"(^|\0)" + FORK_SERVER_MARK.encode() + rb"=[^\0]*/" + name + rb"/")),
    )
    found = []
    for pid in all_pids():
        if pid != os.getpid():
            for read, mark in marks:
                with suppress(OSError):
                    if mark.search(read(pid)):
                        found.append(pid)
                        break
    return found


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
