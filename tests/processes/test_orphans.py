"""What a dead runner left running is found by its mark and killed; nothing else is."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evertick.domain.attempt import FORK_SERVER_MARK as MARK
from evertick.domain.attempt import session_text
from evertick.processes.tree import find_orphans, kill_orphans
from tests.waiting import eventually_sync

# Of this process alone: the tests next to it look for processes, too.
SESSION, OTHER, THIRD = (secrets.randbits(63) for _ in range(3))


def mark_of(session: int) -> str:
    return f"/some/spool/{session_text(session)}/0123-"


class Processes:
    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(arguments, env={**os.environ, **environment}, start_new_session=True)
        self._started.append(process)
        # The kernel shows the command line and the environment a moment after the program has begun.
        eventually_sync(psutil.Process(process.pid).environ)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


def test_everything_that_carries_the_mark_is_killed_with_its_descendants(processes: Processes) -> None:
    """The shell's child has an environment of its own without the mark; it is found through its parent."""
    shell = processes.start("sh", "-c", "env -i sleep 100 & echo started; wait", **{MARK: mark_of(SESSION)})
    plain = processes.start("sleep", "100", **{MARK: mark_of(SESSION)})
    assert {shell.pid, plain.pid} <= set(find_orphans(SESSION))
    assert kill_orphans(SESSION, within_seconds=30)
    assert (shell.wait(30), plain.wait(30)) == (-9, -9)
    assert find_orphans(SESSION) == []


def test_a_fork_server_is_found_by_its_command_line(processes: Processes) -> None:
    """Where it has its runner's whole environment, only its configuration carries the session. Its attempts share it."""
    wait = ("-c", "import time; time.sleep(100)")
    plan = f'{{"spool_prefix": "{mark_of(THIRD)}"}}'
    server = processes.start(sys.executable, *wait, "evertick.attempts.fork_server_main", "5", plan)
    assert find_orphans(THIRD) == [server.pid]


@pytest.mark.requirement("V5")
def test_other_sessions_and_people_who_look_are_left_alone(processes: Processes, tmp_path: Path) -> None:
    """A person who reads a spool file of a dead runner has its session on the command line."""
    folder = tmp_path / session_text(SESSION)
    folder.mkdir()
    (folder / "0123-1.log").write_text("")
    onlooker = processes.start("tail", "-f", str(folder / "0123-1.log"))
    editor = processes.start(
        sys.executable, "-c", "input()", "evertick.attempts.fork_server_main", session_text(SESSION)
    )
    other = processes.start("sleep", "100", **{MARK: mark_of(OTHER)})
    assert find_orphans(SESSION) == []
    assert find_orphans(OTHER) == [other.pid]
    assert kill_orphans(SESSION, within_seconds=30)
    assert (onlooker.poll(), other.poll()) == (None, None)
    editor.kill()
