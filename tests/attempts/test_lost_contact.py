"""Attempts that must not outlive their runner's contact: their warm parent ends them, with everything they started."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertick.attempts.fork_server import LeaseDeadline
from evertick.domain.attempt import AttemptOrder, OutcomeKind
from evertick.processes.system import boot_seconds
from tests.executors.local.executor_rig import Rig, dead, is_alive, rig, text_of

# Each says who it is and who its child is, then lasts.
LASTING = """
import os, signal
from evertick import *

@task
def last(name):
    child = os.fork()
    if child == 0:
        os.setsid()
        while True: signal.pause()
    with open(PIDS + name + '.part', 'w') as f: f.write(f'{os.getpid()} {child}')
    os.rename(PIDS + name + '.part', PIDS + name)
    while True: signal.pause()

@task
def quick():
    return 1

@dag
def d():
    last.override(name='a')('a')
    last.override(name='b')('b')
    quick()
"""


async def start(it: Rig, tmp_path: Path, task: str, *, is_careful: bool) -> tuple[AttemptOrder, list[int]]:
    """The attempt, and the processes of its family."""
    order = it.order(task, stops_on_lost_contact=is_careful)
    it.start(order)
    pids = [int(pid) for pid in (await text_of(tmp_path / f"pids-{task}")).split()]
    assert all(is_alive(pid) for pid in pids)
    return order, pids


@pytest.mark.requirement("N09", "K9", "N11")
async def test_only_the_careful_attempt_is_ended_when_the_time_is_over(tmp_path: Path) -> None:
    async with rig(tmp_path, f"PIDS = {str(tmp_path / 'pids-')!r}\n{LASTING}") as it:
        it.executor.extend_lease(boot_seconds() + 3600)
        careful, its_pids = await start(it, tmp_path, "a", is_careful=True)
        _, other_pids = await start(it, tmp_path, "b", is_careful=False)
        assert await it.result("quick", stops_on_lost_contact=True) == 1, "there is still time"
        it.executor.extend_lease(boot_seconds() + 0.1)
        outcome = await it.outcome(careful)
        assert outcome.kind is OutcomeKind.LOST
        assert (outcome.reason or "").startswith("lost_contact: ")
        for pid in its_pids:
            await dead(pid)
        assert all(is_alive(pid) for pid in other_pids)
        late = await it.run("quick", stops_on_lost_contact=True)
        assert late.kind is OutcomeKind.LOST, "nothing careful starts without contact"
        assert await it.result("quick") == 1


def test_a_guard_without_children_never_disturbs_the_sleep_of_its_warm_parent() -> None:
    guard = LeaseDeadline()
    guard.until = boot_seconds() - 1
    assert (guard.poll_ms(1000), guard.take_cut_off()) == (1000, [])
    guard.children.add(1)
    guard.children.add(2)
    guard.children.discard(1)
    assert (guard.poll_ms(1000), guard.take_cut_off(), guard.take_cut_off()) == (0, [2], [])


def test_a_guard_lets_its_warm_parent_sleep_until_the_time_is_over_and_not_much_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evertick.attempts.fork_server.boot_seconds", lambda: 1000.0)
    guard = LeaseDeadline()
    guard.children.add(1)
    guard.until = 4600.0
    assert (guard.poll_ms(1000), guard.poll_ms(2), guard.take_cut_off()) == (250, 2, [])
    guard.until = 1000.125
    assert (guard.poll_ms(1000), guard.take_cut_off()) == (125, [])
