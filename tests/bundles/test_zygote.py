"""A zygote forks processes that are children of its owner, and no request is lost when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from evertick.bundles.environments import Interpreter
from evertick.bundles.zygote import Fds, Spawned, Zygote, ZygotePlan
from evertick.processes.system import IS_PORTABLE
from evertick.processes.tree import find_by_token
from tests.source_tree import ROOT
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(IS_PORTABLE, reason="this system forks no siblings")

PROGRAM = "tests.bundles.zygote_program"
MARK = "EVERTICK_TEST_MARK"
NO_MARK = "0" * 16


def plan_with(**fields: object) -> ZygotePlan:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return ZygotePlan(
        **{  # type: ignore[arg-type]
            "interpreter": Interpreter(),
            "environment": environment,
            "modules": (PROGRAM,),
            "mark": (MARK, NO_MARK),
            **fields,
        }
    )


@pytest.fixture
async def zygote() -> AsyncIterator[Zygote]:
    made = Zygote(plan_with())
    yield made
    made.close()


@contextmanager
def asked(zygote: Zygote, *arguments: str, mark: str = NO_MARK) -> Iterator[tuple[Spawned, int]]:
    """A process of the program, and what reads its answer."""
    reader, writer = os.pipe()
    given = ["{fd}", *arguments]

    def fresh(fds: Fds) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", PROGRAM, *(str(fds[2]) if each == "{fd}" else each for each in given)]
        environment = {**(zygote.plan.environment or {}), "FRESH": "1"}
        return subprocess.Popen(command, stdout=fds[0], stderr=fds[1], pass_fds=[fds[2]], env=environment)

    with Path(os.devnull).open("wb") as nowhere:
        spawned = zygote.spawn(fresh, PROGRAM, given, (nowhere.fileno(), nowhere.fileno(), writer), mark=mark)
    os.close(writer)
    try:
        yield spawned, reader
    finally:
        spawned.abandon()
        with suppress(OSError):
            os.close(reader)


async def answer(reader: int) -> list[str]:
    text = await asyncio.to_thread(os.read, reader, 4096)
    return text.decode().split()


async def test_its_processes_are_children_of_the_owner_with_a_mark_and_an_exit_code(zygote: Zygote) -> None:
    mark = os.urandom(8).hex()
    with asked(zygote, "wait", mark=mark) as (process, reader):
        how, pid, parent, group = await answer(reader)
        assert (how, int(pid), int(parent), int(group)) == ("forked", process.pid, os.getpid(), process.pid)
        assert find_by_token(mark) == [process.pid]
        assert process.poll() is None
        zygote.close()
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() == -signal.SIGTERM)
    with asked(zygote, "exit", "7") as (process, _):
        await eventually(lambda: process.poll() == 7)


async def test_a_killed_zygote_is_replaced_and_no_request_is_lost(zygote: Zygote) -> None:
    with asked(zygote, "exit", "0") as (_, reader):
        assert (await answer(reader))[0] == "forked"
    first = zygote.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    with asked(zygote, "exit", "3") as (process, reader):
        os.kill(first, signal.SIGKILL)
        assert (await answer(reader))[0] == "fresh"
        await eventually(lambda: process.poll() == 3)
    with asked(zygote, "exit", "0") as (_, reader):
        assert (await answer(reader))[0] == "forked"
    assert zygote.pid not in (None, first)


async def test_a_process_whose_owner_did_not_learn_of_it_never_runs(zygote: Zygote, tmp_path: Path) -> None:
    """The zygote dies between the fork and its message: the owner starts a fresh process, and only that one runs."""
    ran = tmp_path / "ran"
    zygote.plan.environment["BEFORE_BORN"] = "die"  # type: ignore[index]
    with asked(zygote, "append", str(ran)) as (process, reader):
        assert (await answer(reader))[0] == "fresh"
        await eventually(lambda: process.poll() == 0)
    assert ran.read_text() == "fresh\n"


async def test_a_zygote_with_threads_or_with_changed_files_forks_nothing(tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    watched.write_text("1")
    threaded = Zygote(plan_with(modules=(f"{PROGRAM}:start_thread",)))
    with asked(threaded, "exit", "0") as (_, reader):
        assert (await answer(reader))[0] == "fresh"
    assert threaded.pid is None
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "WATCHED": str(watched)}
    watching = Zygote(plan_with(modules=(f"{PROGRAM}:watched",), environment=environment))
    with asked(watching, "exit", "0") as (_, reader):
        assert (await answer(reader))[0] == "forked"
    first = watching.pid
    os.utime(watched, (1, 1))
    with asked(watching, "exit", "0") as (_, reader):
        assert (await answer(reader))[0] == "forked"
    assert watching.pid not in (None, first)
    watching.close()
