"""Runners that are taken out of service: drained, dismissed, stopped in peace or at once."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from evertick.db.notify import Channel, notify
from evertick.domain.access import Actor
from evertick.engine import runners as verb
from tests.system.processes import Installation, is_running
from tests.system.work import let_go, start_run
from tests.waiting import eventually

# A heartbeat this rare cannot be what tells a runner: the wake-up does.
RARE: dict[str, Any] = {"heartbeat_seconds": 100.0, "lost_after_seconds": 3600.0}


async def drain(there: Installation, *names: str, then_leave: bool = False) -> None:
    found = await verb.find_runners(there.conn, names)
    await verb.drain(there.conn, sessions=[each.session for each in found], actor=Actor("test"), then_leave=then_leave)
    await notify(there.conn, Channel.STOP)


async def undrain(there: Installation, *names: str) -> None:
    found = await verb.find_runners(there.conn, names)
    await verb.undrain(there.conn, sessions=[each.session for each in found], actor=Actor("test"))
    await notify(there.conn, Channel.STOP)


@pytest.mark.requirement("K4")
async def test_a_drained_runner_finishes_what_it_has_and_takes_nothing_new_until_it_is_undrained(
    there: Installation,
) -> None:
    runner = await there.start("runner", runner_id="r1", **RARE)
    holding = await start_run(there.conn, "holding")
    first = await there.begun("hold")
    await drain(there, "r1")
    await runner.saw("drain_requested")
    later = await start_run(there.conn, "single")
    await notify(there.conn, Channel.TASKS)
    assert is_running(first.pid)
    assert runner.events("runner_drained") == []
    let_go(there.effects_file)
    await runner.saw("runner_drained")
    assert await there.rows("select task, state::text from all_tasks where run_id = %s order by idx", holding) == [
        ("hold", "success"),
        ("after", "available"),
    ]
    assert await there.value("select state::text from all_tasks where run_id = %s", later) == "available"
    assert await there.value("select count(*) from lease") == 0
    await undrain(there, "r1")
    assert [await there.ended(run_id) for run_id in (holding, later)] == ["success", "success"]
    kept = "select action, actor from audit_log where detail->>'runner' = 'r1' order by entry_id"
    assert await there.rows(kept) == [("drain", "test"), ("undrain", "test")]


@pytest.mark.requirement("K4")
async def test_a_dismissed_runner_ends_well_when_its_last_task_has(there: Installation) -> None:
    runner = await there.start("runner", runner_id="r1", **RARE)
    run_id = await start_run(there.conn, "holding")
    await there.begun("hold")
    await drain(there, "r1", then_leave=True)
    await runner.saw("drain_requested", is_leaving=True)
    assert runner.is_alive
    let_go(there.effects_file)
    assert await runner.ended() == 0
    assert runner.events("runner_exited")
    assert await there.rows("select task, state::text from all_tasks where run_id = %s order by idx", run_id) == [
        ("hold", "success"),
        ("after", "available"),
    ]
    assert await there.value("select end_reason from runner") == "stopped"


async def test_without_wake_ups_a_drain_comes_with_the_heartbeat(there: Installation) -> None:
    runner = await there.start("runner", runner_id="r1", listen_notify=False)
    await drain(there, "r1")
    await runner.saw("runner_drained")


@pytest.mark.requirement("N08", "K4")
async def test_a_drained_runner_declared_dead_stays_drained_under_its_new_session(there: Installation) -> None:
    runner = await there.start("runner", runner_id="r1")
    await drain(there, "r1")
    old = (await runner.saw("runner_drained"))["session"]
    await there.conn.execute("select mark_runner_dead(session, 'agent_lost: test', 3) from runner")
    await eventually(lambda: [each for each in runner.events("runner_drained") if each["session"] != old])
    assert await there.rows("select request from runner where ended_at is null") == [("drain",)]


@pytest.mark.requirement("K4")
async def test_the_second_signal_to_stop_needs_no_grace_and_gives_back_what_runs(there: Installation) -> None:
    leaving = await there.start("runner", runner_id="r1", stop_grace_seconds=3600.0)
    run_id = await start_run(there.conn, "holding")
    first = await there.begun("hold")
    leaving.signal(signal.SIGTERM)
    await leaving.saw("service_stopping", attempts=1)
    await there.start("runner", runner_id="r2")
    assert is_running(first.pid)
    leaving.signal(signal.SIGTERM)
    assert await leaving.ended() == 0
    assert not is_running(first.pid)
    assert (await there.begun("hold", epoch=2)).runner == "r2"
    let_go(there.effects_file)
    assert await there.ended(run_id) == "success"
    assert await there.rows("select outcome from attempt") == [("given_back",)]


@pytest.mark.requirement("K5")
async def test_every_line_says_who_it_is_and_namesakes_are_told_of_each_other(there: Installation) -> None:
    first = await there.start("runner", runner_id="gpu", runner_name="the big one")
    second = await there.start("runner", runner_id="gpu")
    warning = await second.saw("runner_id_duplicated")
    assert (warning["level"], warning["other"]) == ("warning", first.events("runner_started")[0]["session"])
    assert first.events("runner_id_duplicated") == []
    for _ in range(2):
        run_id = await start_run(there.conn, "single")
        assert await there.ended(run_id) == "success"
    for service, name in ((first, "the big one"), (second, None)):
        (session,) = {each["session"] for each in service.events()}
        assert {(each["runner"], each.get("name")) for each in service.events()} == {("gpu", name)}
        assert await there.value("select session from runner where to_hex(session) = ltrim(%s, '0')", session)
