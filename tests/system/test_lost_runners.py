"""Runners that are killed, frozen or told to stop, each with a task in hand."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from tests.system.processes import Installation, Service, is_running
from tests.system.work import Effect, let_go, start_run
from tests.waiting import eventually


async def two_runners(there: Installation) -> dict[str, Service]:
    return {name: await there.start("runner", runner_id=name) for name in ("r1", "r2")}


async def tries(there: Installation, task: str) -> tuple[int, int, str]:
    """Epoch, attempt and state of a task."""
    ((epoch, attempt, state),) = await there.rows(
        "select epoch, attempt, state::text from all_tasks where task = %s", task
    )
    return epoch, attempt, state


@pytest.mark.requirement("N07", "K4", "K3", "F4", "A7", "V8")
async def test_without_a_certificate_silence_tells_and_never_too_early(there: Installation) -> None:
    await there.keep_runners_elsewhere()
    await there.start("scheduler")
    runners = await two_runners(there)
    run_id = await start_run(there.conn, "holding")
    first = await there.begun("hold")
    killed_at = time.monotonic_ns()
    await runners.pop(first.runner).kill()
    second = await there.begun("hold", epoch=2)
    seconds = (second.nanoseconds - killed_at) / 1e9
    settings = there.settings()
    # On a busy machine its last heartbeat may be that much older than its death.
    assert seconds > settings.lost_after_seconds - 3 * settings.heartbeat_seconds
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert await tries(there, "hold") == (2, 1, "success")


async def lose_by_freezing(there: Installation) -> tuple[Service, Effect, Service]:
    """A frozen runner, the attempt that it lost, and the runner that has the task now."""
    await there.start("scheduler")
    frozen = await there.start("runner", runner_id="r1")
    await start_run(there.conn, "holding")
    first = await there.begun("hold")
    frozen.signal(signal.SIGSTOP)
    other = await there.start("runner", runner_id="r2")
    assert (await there.begun("hold", epoch=2)).runner == "r2"
    return frozen, first, other


@pytest.mark.requirement("N08", "F8", "I5", "M5", "K9", "V3")
async def test_a_frozen_runner_that_wakes_up_with_a_result_is_refused(there: Installation) -> None:
    """Its child went on and finished: N08 (a)."""
    frozen, first, _ = await lose_by_freezing(there)
    let_go(there.effects_file, "go1")
    await eventually(lambda: [e for e in there.effects() if (e.epoch, e.what) == (1, "end")])
    frozen.signal(signal.SIGCONT)
    await frozen.saw("lease_lost")
    await frozen.saw("service_stopped", reason="declared_dead")
    assert await tries(there, "hold") == (2, 1, "running"), "the stale report changed nothing"
    assert await there.value("select count(*) from result") == 0
    let_go(there.effects_file)
    assert await there.ended(first.run_id) == "success"
    assert await there.rows("select epoch, value from result where idx = 0") == [(2, "held")]
    assert len([e for e in there.effects() if e.task == "after"]) == 1


@pytest.mark.requirement("N08", "F8", "K2", "K9")
@pytest.mark.parametrize("is_child_frozen", [False, True])
async def test_a_frozen_runner_that_wakes_up_stops_the_body_it_lost(there: Installation, is_child_frozen: bool) -> None:
    """N08: the child is killed and never gets to its end. Within two seconds: that is measured by `make chaos`, on a machine of
    its own."""
    frozen, first, _ = await lose_by_freezing(there)
    if is_child_frozen:
        os.kill(first.pid, signal.SIGSTOP)
    frozen.signal(signal.SIGCONT)
    if is_child_frozen:
        with suppress(ProcessLookupError):
            os.kill(first.pid, signal.SIGCONT)
    await eventually(lambda: not is_running(first.pid))
    buried = await frozen.saw("session_declared_dead")
    assert buried["level"] == "error"
    let_go(there.effects_file)
    assert await there.ended(first.run_id) == "success"
    assert [(e.epoch, e.what) for e in there.effects() if e.what == "end" and e.task == "hold"] == [(2, "end")]


@pytest.mark.requirement("N08", "F8", "K9", "K5")
async def test_a_frozen_runner_declared_dead_continues_under_a_new_session(there: Installation) -> None:
    frozen, first, other = await lose_by_freezing(there)
    frozen.signal(signal.SIGCONT)
    old = (await frozen.saw("session_declared_dead"))["session"]
    started = await eventually(lambda: [e for e in frozen.events("runner_started") if e["session"] != old])
    assert started[0]["runner"] == "r1"
    assert frozen.is_alive
    let_go(there.effects_file)
    assert await there.ended(first.run_id) == "success"
    assert await other.terminate() == 0
    run_id = await start_run(there.conn, "single")
    assert await there.ended(run_id) == "success"
    assert [e.runner for e in there.effects() if e.run_id == run_id] == ["r1", "r1"]
    assert await frozen.terminate() == 0
    gone = await there.rows("select end_reason from runner where runner_id = 'r1' order by started_at")
    assert gone == [("agent_lost: no heartbeat for 2 s",), ("stopped",)]


@pytest.mark.requirement("K4")
async def test_a_runner_that_is_told_to_stop_lets_its_task_end_within_the_grace(there: Installation) -> None:
    runner = await there.start("runner", runner_id="r1", stop_grace_seconds=20.0)
    run_id = await start_run(there.conn, "holding")
    await there.begun("hold")
    runner.signal(signal.SIGTERM)
    let_go(there.effects_file)
    assert await runner.ended() == 0
    assert await tries(there, "hold") == (1, 1, "success")
    await there.start("runner", runner_id="r2")
    assert await there.ended(run_id) == "success"
    assert await there.value("select end_reason from runner where runner_id = 'r1'") == "stopped"


@pytest.mark.requirement("K4")
async def test_a_task_that_outlasts_the_grace_is_given_back_and_runs_elsewhere(there: Installation) -> None:
    leaving = await there.start("runner", runner_id="r1", stop_grace_seconds=0.3)
    run_id = await start_run(there.conn, "holding")
    first = await there.begun("hold")
    await there.start("runner", runner_id="r2")
    asked_at = time.monotonic()
    assert await leaving.terminate() == 0
    assert time.monotonic() - asked_at < 20
    assert not is_running(first.pid)
    assert (await there.begun("hold", epoch=2)).runner == "r2"
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert await tries(there, "hold") == (2, 1, "success")
    assert not [each for each in there.effects() if each.what == "overlap"]
    assert await there.rows("select outcome from attempt") == [("given_back",)]
