"""The portable calls promise what those of Linux promise, where a runner depends on it. `make portable` runs more tests with
them."""

from __future__ import annotations

import inspect
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from evertick.processes import linux, portable, system
from evertick.processes.portable import message_pair
from tests.source_tree import ROOT
from tests.waiting import eventually_sync

FORCED = {**os.environ, "PORTABLE_PROCESSES": "1"}
CORE = (
    "tests/executors/local/test_isolation.py::test_one_order_runs_exactly_one_body",
    "tests/executors/local/test_stopping.py::test_a_timeout_kills_the_whole_family_and_says_so",
    "tests/executors/local/test_stopping.py::test_a_shell_and_its_pipeline_die_together",
    "tests/processes/test_orphans.py",
)


def public(module: ModuleType) -> dict[str, list[str] | None]:
    """The names that `system` offers, with the parameters of the functions."""
    found = {name: getattr(module, name) for name in dir(system) if hasattr(linux, name) and not name.startswith("_")}
    return {
        name: [parameter.name for parameter in inspect.signature(getattr(module, name)).parameters.values()]
        if inspect.isfunction(inspect.unwrap(each)) and name not in ("send_fds", "recv_fds")
        else None
        for name, each in found.items()
        if hasattr(module, name)
    }


def test_both_have_the_same_functions() -> None:
    assert public(portable) == public(linux)
    assert len(public(linux)) > 30


@pytest.mark.long
def test_a_runner_runs_kills_times_out_and_cleans_up_with_them() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *CORE]
    done = subprocess.run(command, cwd=ROOT, env=FORCED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    look = "from evertick.processes import system; print(system.IS_PORTABLE, system.pin.__module__)"
    used = subprocess.run([sys.executable, "-c", look], env=FORCED, capture_output=True, text=True, check=True)
    assert used.stdout.split() == ["True", "evertick.processes.portable"]


def test_messages_arrive_whole_one_by_one_and_with_their_descriptors() -> None:
    ours, theirs = message_pair()
    with ours, theirs, Path(os.devnull).open("rb") as first:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            portable.recv_fds(ours, 100, 2)
        portable.send_fds(theirs, [b"born"], [first.fileno(), first.fileno()])
        theirs.send(b"ready")
        theirs.send(b"dead")
        message, fds, _, _ = portable.recv_fds(ours, 100, 2)
        assert (message, len(fds), {os.fstat(fd).st_rdev for fd in fds}) == (
            b"born",
            2,
            {Path(os.devnull).stat().st_rdev},
        )
        for fd in fds:
            os.close(fd)
        assert [portable.recv_fds(ours, 100, 2)[0] for _ in range(2)] == [b"ready", b"dead"]


def test_a_message_larger_than_the_buffer_waits_for_its_reader_and_a_closed_end_is_empty() -> None:
    ours, theirs = message_pair()
    with ours:
        reader = subprocess.Popen(
            [sys.executable, "-c", _READ, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
        )
        theirs.close()
        ours.setblocking(False)
        assert ours.send(b"x" * 3_000_000) == 3_000_000
        assert reader.communicate(timeout=30)[0].split() == [b"3000000"]
        assert ours.recv(100) == b""


_READ = """
import sys
from evertick.processes.portable import message_socket
print(len(message_socket(int(sys.argv[1])).recv(100)))
"""


def test_the_end_of_a_process_is_readable_and_signals_reach_no_other() -> None:
    process = subprocess.Popen(["sleep", "100"])
    pinned, ends = portable.pin(process.pid), portable.exit_fd(process.pid)
    try:
        assert select.select([ends], [], [], 0)[0] == []
        portable.send_signal(pinned, signal.SIGKILL)
        assert select.select([ends], [], [], 30)[0] == [ends]
        assert portable.facts_of(process.pid).has_ended
        process.wait()
        with pytest.raises(ProcessLookupError):
            portable.send_signal(pinned, signal.SIGKILL)
        with pytest.raises(ProcessLookupError):
            portable.facts_of(process.pid)
    finally:
        os.close(ends)
        process.kill()
        process.wait()


def test_an_orphan_is_found_by_the_session_of_its_attempt() -> None:
    leader = subprocess.Popen(
        ["sh", "-c", "(sleep 100 & echo $!)"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    orphan = int(leader.stdout.readline())
    leader.wait()
    try:
        assert portable.adopted({leader.pid}) == [orphan]
        assert portable.adopted(set()) == []
        assert portable.facts_of(orphan).session == leader.pid
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_tied_process_stops_when_its_parent_is_killed() -> None:
    program = """
import subprocess, sys, time
from evertick.processes.portable import tied_to_this_process
child = subprocess.Popen(tied_to_this_process([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"]))
print(child.pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    started_at = time.monotonic()
    eventually_sync(lambda: "evertick.processes.portable" in child.cmdline() and child.num_threads() > 1)
    parent.kill()
    parent.wait()
    eventually_sync(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert time.monotonic() - started_at < 60
