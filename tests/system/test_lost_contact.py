"""A runner that is frozen, or cannot reach the database: what goes on, what stops in time, and what is decided afterwards."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from evertick.db.connect import Purpose, connect
from tests.system.processes import Installation, is_running
from tests.system.work import let_go, start_run
from tests.waiting import eventually


@asynccontextmanager
async def no_heartbeat_is_answered(there: Installation) -> AsyncIterator[None]:
    """The database is up and reachable, but has no answer for runners."""
    async with await connect(there.url, purpose=Purpose.SCHEDULER) as blocker:
        await blocker.execute("set idle_in_transaction_session_timeout = 0")
        async with blocker.transaction():
            await blocker.execute("lock table runner in access exclusive mode")
            yield


@pytest.mark.requirement("N09", "K9", "N15")
async def test_by_default_an_attempt_goes_on_while_its_runner_is_cut_off(there: Installation) -> None:
    runner = await there.start("runner", runner_id="r1")
    run_id = await start_run(there.conn, "holding")
    await there.begun("hold")
    async with no_heartbeat_is_answered(there):
        await runner.saw("database_unreachable", loop="spare_heartbeat")
        let_go(there.effects_file)
        await eventually(lambda: [each for each in there.effects() if each.what == "end"])
    assert await there.ended(run_id) == "success"
    assert await there.value("select max(epoch) from all_tasks") == 1
    assert runner.is_alive


@pytest.mark.requirement("N09", "K9")
async def test_a_careful_attempt_is_stopped_while_its_runner_is_cut_off_and_runs_again_afterwards(
    there: Installation,
) -> None:
    await there.start("runner", runner_id="r1")
    run_id = await start_run(there.conn, "careful")
    first = await there.begun("hold")
    async with no_heartbeat_is_answered(there):
        await eventually(lambda: not is_running(first.pid), 60)
        assert await there.value("select state::text from task where run_id = %s and idx = 0", run_id) == "running"
    let_go(there.effects_file, "go2")
    assert await there.ended(run_id) == "success"
    ((epoch, outcome, reason),) = await there.rows("select epoch, outcome, reason from attempt")
    assert (epoch, outcome) == (1, "lost")
    assert reason.startswith("lost_contact: ")
    assert await there.rows("select epoch, attempt from all_tasks where task = 'hold'") == [(2, 1)], "no user's attempt"


@pytest.mark.requirement("N08", "N09", "F8")
async def test_a_careful_attempt_of_a_frozen_runner_is_dead_before_its_lease_passes_on(there: Installation) -> None:
    """Its warm parent sees to it: the runner itself cannot."""
    await there.start("scheduler")
    frozen = await there.start("runner", runner_id="r1")
    run_id = await start_run(there.conn, "careful")
    first = await there.begun("hold")

    async def is_dead() -> bool:
        has_passed = await there.value("select count(*) = 0 from lease where epoch = 1")
        assert not (has_passed and is_running(first.pid))
        return not is_running(first.pid)

    frozen.signal(signal.SIGSTOP)
    await there.start("runner", runner_id="r2")
    await eventually(is_dead, 60)
    assert (await there.begun("hold", epoch=2)).runner == "r2"
    frozen.signal(signal.SIGCONT)
    await frozen.saw("session_declared_dead")
    await frozen.saw("lease_lost")
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert [each for each in there.effects() if each.what == "overlap"] == []
    assert await there.rows("select outcome, split_part(reason, ':', 1) from attempt") == [("lost", "agent_lost")]


@pytest.mark.requirement("N09", "K9")
async def test_a_careful_attempt_goes_on_as_long_as_heartbeats_are_answered(there: Installation) -> None:
    await there.start("runner", runner_id="r1")
    run_id = await start_run(there.conn, "careful")
    first = await there.begun("hold")
    before = await there.value("select heartbeat_seq from runner")
    # Longer than what one answer is good for.
    await eventually(lambda: there.value("select heartbeat_seq > %s from runner", before + 12), 60)
    assert is_running(first.pid)
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert await there.value("select max(epoch) from all_tasks") == 1
