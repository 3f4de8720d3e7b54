"""Stopping attempts: timeout, cancel and lost lease, down to the last descendant."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.executors.local.child_process import ExecutorLimits
from evertick.processes.system import children_of
from evertick.processes.tree import find_by_token, kill_tree
from tests.executors.local.executor_rig import Rig, dag_of, is_alive, rig, text_of
from tests.waiting import eventually, eventually_sync

# A family: a child that ignores SIGTERM, one in its own session, and a double-forked grandchild; all told to a file.
STUBBORN = """
import os, signal, subprocess
from evertick import *

def rest():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(PIDS + '.part', 'a') as f: f.write(f'{os.getpid()} ')
    while True: signal.pause()

@task
def family():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0: rest()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: rest()
        os._exit(0)
    if os.fork() == 0:
        os.setsid(); rest()
    while len(open(PIDS + '.part').read().split()) < 3 if os.path.exists(PIDS + '.part') else True: pass
    with open(PIDS + '.part', 'a') as f: f.write(f'{os.getpid()} ')
    os.rename(PIDS + '.part', PIDS)
    while True: signal.pause()

@dag
def d(): family()
"""


async def family_of(it: Rig, tmp_path: Path) -> list[int]:
    pids = [int(pid) for pid in (await text_of(tmp_path / "pids")).split()]
    assert len(pids) == 4 and all(is_alive(pid) for pid in pids)
    return pids


@pytest.mark.requirement("B1", "N11")
async def test_a_timeout_kills_the_whole_family_and_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path, f"PIDS = {str(tmp_path / 'pids')!r}\n{STUBBORN}") as it:
        for seconds in (0.5, 4.5, 32.5):  # on a busy machine half a second may pass before the whole family is there
            outcome = await it.run("family", timeout_seconds=seconds)
            assert (outcome.kind, outcome.reason) == (OutcomeKind.TIMED_OUT, f"execution_timeout: exceeded {seconds} s")
            if (tmp_path / "pids").exists():
                break
            (tmp_path / "pids.part").unlink(missing_ok=True)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 4 and [pid for pid in pids if is_alive(pid)] == []


@pytest.mark.requirement("N11")
@pytest.mark.parametrize("grace_seconds", [0, 0.1])
async def test_a_kill_is_reported_when_the_last_of_the_family_is_dead(tmp_path: Path, grace_seconds: float) -> None:
    async with rig(tmp_path, f"PIDS = {str(tmp_path / 'pids')!r}\n{STUBBORN}") as it:
        order = it.order("family")
        it.start(order)
        pids = await family_of(it, tmp_path)
        it.executor.kill(order.key, order.epoch, "lease lost", grace_seconds)
        outcome = await it.outcome(order)
        assert (outcome.kind, outcome.reason) == (OutcomeKind.KILLED, "lease lost")
        assert [pid for pid in pids if is_alive(pid)] == []
        assert it.executor.held() == []


@pytest.mark.requirement("N11")
async def test_a_frozen_body_is_killed_too(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of("def freezes():\n    os.kill(os.getpid(), signal.SIGSTOP)")) as it:
        outcome = await it.run("freezes", timeout_seconds=0.2)
        assert outcome.kind is OutcomeKind.TIMED_OUT


async def test_a_cancelled_body_is_told_and_may_tidy_up(tmp_path: Path) -> None:
    source = dag_of(
        "def tidies():\n    print('ready')\n    current_context().cancelled.wait()\n"
        "    print('tidying', current_context().is_cancelled())\n    return 'half'",
        "async def tidies_async():\n    import asyncio\n    print('ready')\n    try: await asyncio.Event().wait()\n"
        "    except asyncio.CancelledError: print('tidying', current_context().is_cancelled()); raise",
    )
    async with rig(tmp_path, source) as it:
        for task in ("tidies", "tidies_async"):
            for isolation in Isolation:
                order = it.order(task, isolation=isolation)
                it.start(order)
                await it.chunk_with(order, "ready")
                it.executor.kill(order.key, order.epoch, "canceled by ann", grace_seconds=20)
                outcome = await it.outcome(order)
                assert (outcome.kind, outcome.reason) == (OutcomeKind.KILLED, "canceled by ann")
                assert outcome.result_json is None
                assert "OUT tidying True" in outcome.log.decode()


async def test_a_second_kill_without_grace_ends_the_grace_of_the_first(tmp_path: Path) -> None:
    async with rig(tmp_path, f"PIDS = {str(tmp_path / 'pids')!r}\n{STUBBORN}") as it:
        order = it.order("family")
        it.start(order)
        await family_of(it, tmp_path)
        it.executor.kill(order.key, order.epoch, "canceled", grace_seconds=60)
        it.executor.kill(order.key, order.epoch, "lease lost", grace_seconds=0)
        assert (await it.outcome(order)).reason == "canceled"


async def test_killing_what_has_not_started_or_has_ended_is_simple(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of("def fine(): pass")) as it:
        order = it.order("fine")
        it.start(order)
        it.executor.kill(order.key, order.epoch, "canceled")
        assert (await it.outcome(order)).kind is OutcomeKind.KILLED
        assert (await it.run("fine")).kind is OutcomeKind.SUCCESS
        it.executor.kill(order.key, order.epoch, "canceled again")
        it.executor.kill(order.key, 99, "another epoch")


async def test_a_shell_and_its_pipeline_die_together(tmp_path: Path) -> None:
    source = "from evertick import *\n@dag\ndef d(): shell('sh', 'x')\n"
    async with rig(tmp_path, source) as it:
        pids = tmp_path / "pids"
        order = it.order(
            "sh", command=f"sleep 1000 | sleep 1000 & echo $! $$ >{pids}.part; mv {pids}.part {pids}; wait"
        )
        it.start(order)
        found = [int(pid) for pid in (await text_of(pids)).split()]
        it.executor.kill(order.key, order.epoch, "canceled", grace_seconds=0)
        assert (await it.outcome(order)).kind is OutcomeKind.KILLED
        assert [pid for pid in found if is_alive(pid)] == []


@pytest.mark.requirement("N11")
async def test_a_fork_bomb_is_stopped(tmp_path: Path) -> None:
    bomb = (
        "def bomb():\n    n = 0\n    while True:\n        if os.fork() == 0: n += 1\n        if n > 3: signal.pause()"
    )
    others = children_of(os.getpid())
    async with rig(tmp_path, dag_of(bomb)) as it:
        outcome = await it.run("bomb", timeout_seconds=0.05)
        assert outcome.kind is OutcomeKind.TIMED_OUT
        (keeper,) = set(children_of(os.getpid())) - set(others)
        (parent,) = children_of(keeper)
        await eventually(lambda: len(children_of(parent)) <= 8)
        assert all(not children_of(child) for child in children_of(parent))


async def test_a_warm_parent_that_hangs_is_given_up_with_its_attempts(tmp_path: Path) -> None:
    waits = "def waits():\n    print(os.getpid(), os.getppid())\n    while True: signal.pause()"
    limits = ExecutorLimits(kill_confirm_seconds=0.1)
    async with rig(tmp_path, dag_of(waits), limits=limits) as it:
        order, neighbour = it.order("waits"), it.order("waits")
        it.start(order, neighbour)
        text = await it.chunk_with(order, "OUT")
        pid, parent = map(int, text.split()[-2:])
        os.kill(parent, signal.SIGSTOP)
        it.executor.kill(order.key, order.epoch, "canceled")
        assert (await it.outcome(order)).reason == "canceled"
        collateral = await it.outcome(neighbour)
        assert collateral.kind is OutcomeKind.LOST, "another task was stopped, not this one"
        assert "its fork server ended" in (collateral.reason or "")
        assert not is_alive(pid) and not is_alive(parent)


async def test_stop_gives_back_what_cannot_end_in_time_and_leaves_no_process(tmp_path: Path) -> None:
    source = dag_of(
        "def ends():\n    print('ready')\n    open(GATE).read()\n    return 1",
        "def stays():\n    print('ready', os.getpid())\n    while True: signal.pause()",
    )
    os.mkfifo(tmp_path / "gate")
    others = children_of(os.getpid())
    async with rig(tmp_path, f"GATE = {str(tmp_path / 'gate')!r}\n{source}", slots=4) as it:
        ends, stays = it.order("ends"), it.order("stays")
        it.start(ends, stays)
        await it.chunk_with(ends, "ready")
        pid = int((await it.chunk_with(stays, "ready")).split()[-1])
        os.close(await asyncio.to_thread(os.open, tmp_path / "gate", os.O_WRONLY))
        await it.executor.stop(grace_seconds=1)
        assert (await it.outcome(ends)).kind is OutcomeKind.SUCCESS
        given_back = await it.outcome(stays)
        assert given_back.kind is OutcomeKind.GIVEN_BACK
        assert given_back.reason == "the runner stopped before the attempt ended"
        assert not is_alive(pid)
        assert children_of(os.getpid()) == others


async def test_stop_gives_back_at_once_what_has_not_started(tmp_path: Path) -> None:
    source = "import signal\nwhile True: signal.pause()\n"
    async with rig(tmp_path, source) as it:
        order = it.order("never")
        it.start(order)
        await eventually(lambda: it.executor._executors)
        await it.executor.stop(grace_seconds=30)
        assert (await it.outcome(order)).kind is OutcomeKind.GIVEN_BACK


def test_a_tree_is_killed_by_walking_it(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    root = os.fork()
    if root == 0:
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                os.write(write_end, f"{os.getpid()} ".encode())
                while True:
                    signal.pause()
        while True:
            signal.pause()
    written = b""
    while written.count(b" ") < 3:
        written += os.read(read_end, 100)
    assert sorted(children_of(root)) == sorted(map(int, written.split()))
    kill_tree(root)
    eventually_sync(lambda: not any(is_alive(pid) for pid in map(int, written.split())))
    assert os.waitstatus_to_exitcode(os.waitpid(root, 0)[1]) == -signal.SIGKILL


def test_a_tree_that_is_gone_is_no_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    kill_tree(pid)
    assert children_of(pid) == []
    assert find_by_token(json.dumps({"no": "such token"})) == []
