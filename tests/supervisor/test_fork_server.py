"""The process that forks the services of `up`: they are as if started on their own, and its own death costs no service."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.source_tree import ROOT
from tests.system.processes import is_running
from tests.waiting import eventually_sync

pytestmark = pytest.mark.linux


def user(scenario: str, status: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.supervisor.fork_server_user", scenario]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_forked_service_is_like_one_that_was_started_on_its_own() -> None:
    found = user("lives")
    seen = found["seen"]
    assert seen["arguments"] == ["evertick", "ends", "7"]
    assert seen["command"].rstrip() == "evertick ends 7"
    assert seen["environment"]["MINE"] == "a value" and "HOME" not in seen["environment"]
    assert seen["descriptors"][:3] == [0, 1, 2] and seen["leads"]
    assert seen["hears"] == ["builtin_function_or_method", "Handlers"]
    assert found["codes"] == [7, 1, -15, -9] and found["returncode"] == -9


def test_after_the_fork_server_dies_services_stop_gracefully_and_new_ones_start_without_it() -> None:
    assert user("dies") == {"code": -15, "lost": ["lost"], "pid": None, "next": "evertick 0"}


def test_a_hung_fork_server_delays_no_service_and_its_late_forks_are_ended() -> None:
    assert user("freezes") == {"instead": "evertick 0", "still": True}


def test_an_environment_that_is_too_large_to_send_is_no_obstacle() -> None:
    assert user("bursts") == {"next": "evertick 0"}


def test_nothing_outlives_the_one_who_opened_it() -> None:
    pids = user("leaves", status=-9)
    eventually_sync(lambda: not any(is_running(pid) for pid in pids.values()))
