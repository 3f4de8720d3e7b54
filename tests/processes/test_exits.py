"""Why a process ended that could not say so itself."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from evertick.processes.tree import OomEvidence, explain_exit


@pytest.mark.parametrize(
    ("status", "has_oom", "reason", "code"),
    [
        (3 << 8, False, "exited with code 3", 3),
        (signal.SIGSEGV, False, "killed by SIGSEGV", -11),
        (signal.SIGKILL, False, "killed by SIGKILL (possibly out of memory)", -9),
        (signal.SIGKILL, True, "out of memory: killed by SIGKILL (the kernel's out-of-memory killer ran)", -9),
        (signal.SIGSEGV, True, "killed by SIGSEGV", -11),
    ],
)
@pytest.mark.requirement("B10")
def test_exit_code_signal_and_out_of_memory_are_told_apart(status: int, has_oom: bool, reason: str, code: int) -> None:
    assert explain_exit(status, has_oom_evidence=has_oom) == (reason, code)


def test_a_shell_says_which_signal_its_command_died_of() -> None:
    assert explain_exit(4 << 8, has_oom_evidence=False, is_shell=True).reason == "exited with code 4"
    reason = explain_exit(137 << 8, has_oom_evidence=True, is_shell=True).reason
    assert reason == "exited with code 137 (a command in it was killed by SIGKILL; out of memory)"


def test_the_counters_of_the_out_of_memory_killer_are_compared(tmp_path: Path) -> None:
    counters = tmp_path / "memory.events"
    counters.write_text("oom 4\noom_kill 1\n")
    evidence = OomEvidence([counters, tmp_path / "absent"])
    assert not evidence.has_new()
    counters.write_text("oom 5\noom_kill 2\n")
    assert evidence.has_new()
    assert not evidence.has_new()
