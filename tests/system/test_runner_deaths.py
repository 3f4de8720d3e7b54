"""Runners that are killed, with a task in hand: what proves their death, and how soon their tasks run again."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from evertick.processes.system import children_of, facts_of
from evertick.processes.tree import find_orphans
from tests.system.processes import Installation, Service, is_running
from tests.system.work import let_go, start_run
from tests.waiting import eventually

# Without a certificate, nothing would happen for an hour.
SILENT: dict[str, Any] = {"heartbeat_seconds": 30.0, "lost_after_seconds": 3600.0}


def parent_of(pid: int) -> int:
    return facts_of(pid).parent


async def two_runners(there: Installation) -> dict[str, Service]:
    return {name: await there.start("runner", runner_id=name, **SILENT) for name in ("r1", "r2")}


@pytest.mark.requirement("N07", "K4", "M4", "F4", "B2", "D7")
async def test_a_killed_runners_task_runs_again_elsewhere_because_its_neighbour_saw_it_die(there: Installation) -> None:
    runners = await two_runners(there)
    run_id = await start_run(there.conn, "holding")
    first = await there.begun("hold")
    dead = runners.pop(first.runner)
    (other,) = runners.values()
    await dead.kill()
    second = await there.begun("hold", epoch=2)
    assert second.runner in runners
    assert not is_running(first.pid)
    assert (await other.saw("runner_declared_dead"))["gone"] == first.runner
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert await there.rows("select epoch, attempt from all_tasks where task = 'hold'") == [(2, 1)], "no user's attempt"
    assert not [each for each in there.effects() if each.what == "overlap"]
    ((epoch, outcome, reason),) = await there.rows("select epoch, outcome, reason from attempt")
    assert (epoch, outcome, reason) == (1, "lost", f"agent_lost: runner {first.runner} died")


@pytest.mark.requirement("N07", "K4")
async def test_a_scheduler_of_the_same_machine_sees_it_as_well(there: Installation) -> None:
    scheduler = await there.start("scheduler")
    runner = await there.start("runner", runner_id="r1", **SILENT)
    await start_run(there.conn, "holding")
    await there.begun("hold")
    await runner.kill()
    await scheduler.saw("runner_declared_dead", gone="r1")
    assert await there.value("select state::text from all_tasks where task = 'hold'") == "available"


@pytest.mark.requirement("N07", "K4")
async def test_one_that_joined_a_moment_ago_is_missed_as_soon_as_an_old_one(there: Installation) -> None:
    """Who is there is asked once in ten ticks, here every 200 seconds: only that it joined makes it known."""
    scheduler = await there.start("scheduler", tick_seconds=20.0, leader_lease_seconds=60.0, **SILENT)
    await scheduler.saw("leadership_acquired")
    runner = await there.start("runner", runner_id="young", **SILENT)
    await runner.kill()
    await scheduler.saw("runner_declared_dead", gone="young")


@pytest.mark.requirement("N07", "D7", "K5")
async def test_a_runner_that_is_started_again_buries_the_one_that_was_killed(there: Installation) -> None:
    """As a service manager does it, with the same readable id. It is no namesake: it is dead."""
    await (await there.start("runner", runner_id="r1", **SILENT)).kill()
    run_id = await start_run(there.conn, "single")
    again = await there.start("runner", runner_id="r1", **SILENT)
    await again.saw("runner_declared_dead", gone="r1")
    assert await there.ended(run_id) == "success"
    assert again.events("runner_id_duplicated") == []


@pytest.mark.requirement("N07", "V5")
async def test_no_death_is_certified_while_a_body_is_left_and_what_is_left_is_killed(there: Installation) -> None:
    """Its warm parents are frozen, so they cannot end what they started, and a body hides in a session of its own."""
    runners = await two_runners(there)
    run_id = await start_run(there.conn, "family")
    first = await there.begun("parent")
    await eventually(lambda: [each for each in there.effects() if each.what == "hidden"])
    dead = runners.pop(first.runner)
    session = await there.value("select session from runner where runner_id = %s", first.runner)
    (keeper,) = children_of(dead.pid)
    (parent,) = children_of(keeper)
    bodies = find_orphans(session)
    assert {keeper, parent, first.pid} < set(bodies)
    for pid in (keeper, parent):
        os.kill(pid, signal.SIGSTOP)
    await dead.kill()
    await there.begun("parent", epoch=2)
    assert [pid for pid in bodies if is_running(pid)] == []
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"


@pytest.mark.requirement("D7", "B2")
async def test_a_killed_fork_server_costs_no_task_its_attempt(there: Installation) -> None:
    """In processes of their own and in warm ones; the runner lives, and runs them again."""
    await there.start("runner", runner_id="r1", **SILENT)
    run_id = await start_run(there.conn, "holding")
    first = await there.begun("hold")
    os.kill(parent_of(first.pid), signal.SIGKILL)
    await there.begun("hold", epoch=2)
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert await there.rows("select epoch, attempt from all_tasks where task = 'hold'") == [(2, 1)], "no user's attempt"
    assert await there.rows("select outcome, reason from attempt") == [
        ("lost", "its fork server ended: killed by SIGKILL")
    ]


@pytest.mark.requirement("D7", "B2", "V11")
async def test_a_task_that_always_kills_its_fork_server_ends_as_failed(there: Installation) -> None:
    await there.start("runner", runner_id="r1", infra_retries=1, **SILENT)
    run_id = await start_run(there.conn, "deadly")
    assert await there.ended(run_id) == "failed"
    assert await there.rows("select state::text, epoch, reason from all_tasks where run_id = %s", run_id) == [
        ("failed", 2, "its fork server ended: killed by SIGKILL")
    ]


@pytest.mark.requirement("B2", "K4", "A8")
async def test_the_control_plane_decides_what_follows_a_loss(there: Installation) -> None:
    """`rerun_on_loss=False` fails at once, and what follows is decided in that transaction: nobody else is alive."""
    await there.start("runner", runner_id="r1", **SILENT)
    run_id = await start_run(there.conn, "only_once")
    await there.begun("once")
    await there.kill_all("runner")
    assert await there.certify_deaths()
    assert await there.ended(run_id) == "failed"
    rows = await there.rows("select task, state::text, reason from all_tasks where run_id = %s order by idx", run_id)
    assert rows[0][:2] == ("once", "failed")
    assert "agent_lost" in rows[0][2]
    assert rows[1][:2] == ("tidy_up", "upstream_failed")
