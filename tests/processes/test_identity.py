"""Who may say that a runner is dead: only somebody at the same place who cannot be mistaken (V5)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from evertick.config import Settings
from evertick.db.queries.runners import ListedRunner, NewRunner
from evertick.processes.identity import is_provably_gone, pid_started, this_process
from evertick.runner.registration import new_runner
from tests.waiting import eventually_sync


def as_listed(new: NewRunner, **changes: Any) -> ListedRunner:
    fields = (
        "session",
        "runner_id",
        "host",
        "boot_id",
        "pid_namespace",
        "uid",
        "pid",
        "pid_started",
        "queues",
        "slots",
    )
    known = {name: getattr(new, name) for name in fields}
    return ListedRunner(**{**known, "started_at": datetime.now(UTC), "silent_seconds": 0.0, **changes})


@pytest.fixture
def me() -> NewRunner:
    return new_runner(1, Settings())


def test_a_process_that_lives_is_not_gone(me: NewRunner) -> None:
    assert not is_provably_gone(as_listed(me), this_process())


@pytest.mark.requirement("V5")
@pytest.mark.parametrize("elsewhere", [{"host": "x"}, {"boot_id": "x"}, {"pid_namespace": "x"}])
def test_nobody_can_tell_of_another_host_boot_or_namespace(me: NewRunner, elsewhere: dict[str, str]) -> None:
    gone = as_listed(me, pid_started=0.0)
    assert is_provably_gone(gone, this_process())
    assert not is_provably_gone(replace(gone, **elsewhere), this_process())  # type: ignore[arg-type]


@pytest.mark.requirement("V5")
def test_nobody_but_root_can_tell_of_another_users_processes(me: NewRunner) -> None:
    """They may be hidden from us."""
    gone, place = as_listed(me, pid_started=0.0, uid=1234), this_process()
    assert is_provably_gone(gone, replace(place, uid=1234))
    assert is_provably_gone(gone, replace(place, uid=0))
    assert not is_provably_gone(gone, replace(place, uid=4321))


def test_a_pid_that_was_given_to_another_process_is_gone(me: NewRunner) -> None:
    assert is_provably_gone(as_listed(me, pid_started=me.pid_started - 1), this_process())


def test_a_process_that_ended_is_gone_whether_it_was_reaped_or_not(me: NewRunner) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listed = as_listed(me, pid=process.pid, pid_started=pid_started(process.pid))
    assert not is_provably_gone(listed, this_process())
    process.kill()
    eventually_sync(lambda: is_provably_gone(listed, this_process()))
    process.wait()
    assert is_provably_gone(listed, this_process())
    process.communicate()


@pytest.mark.requirement("K5")
def test_a_runner_is_called_after_its_place_unless_it_has_an_id_of_its_own(me: NewRunner) -> None:
    assert me.runner_id == f"{this_process().host}-{me.pid}"
    named = new_runner(1, Settings(runner_id="gpu-1", runner_name="the big one"))
    assert (named.runner_id, named.name) == ("gpu-1", "the big one")
