"""The database dies, is away, or its answers are lost: nothing is lost, nothing is killed, nothing happens twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from evertick.db import failpoints
from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.errors import PostgresUnavailable
from evertick.engine.runs import trigger
from tests.engine import invariants
from tests.system.boundaries import Rehearsed, Site, Stage, failures, in_pairs
from tests.system.mortal_postgres import MortalPostgres, mortal_postgres
from tests.system.processes import Installation
from tests.system.work import Published, executed_twice, let_go, publish_work, schedule_now, start_run
from tests.waiting import eventually


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalPostgres]:
    with mortal_postgres(tmp_path_factory.mktemp("mortal") / "home") as server:
        yield server


@pytest.fixture(scope="module")
def mortal_template(mortal: MortalPostgres) -> str:
    return mortal.cluster.template()


@pytest.fixture
async def mortal_there(
    mortal: MortalPostgres, mortal_template: str, tmp_path: Path, long: Published
) -> AsyncIterator[Installation]:
    url = mortal.cluster.database_url(mortal.cluster.create(mortal_template))
    async with Installation(url, tmp_path / "there") as installation:
        await invariants.install(installation.conn)
        await publish_work(installation.conn, long)
        yield installation
        assert await invariants.violations(installation.conn) == []
        assert executed_twice(installation.effects()) == []


async def trigger_until_acknowledged(there: Installation, key: str) -> int:
    """As a client would: the same key again until there is an answer."""
    while True:
        try:
            return await start_run(there.conn, "single", key=key)
        except (psycopg.OperationalError, PostgresUnavailable):
            await there.reconnect()


@pytest.mark.requirement("N12", "K10", "M3", "F3", "I7", "B9")
async def test_postgres_is_killed_under_load_and_nothing_is_lost(
    mortal: MortalPostgres, mortal_there: Installation, long: Published
) -> None:
    """N12, small."""
    there = mortal_there
    services = [await there.start("runner", runner_id=name) for name in ("r1", "r2")]
    services.append(await there.start("scheduler"))
    instants = await schedule_now(there.conn, long, "alone", every=0.1, times=30)
    acknowledged: list[int] = []
    for number in range(160):
        acknowledged.append(await trigger_until_acknowledged(there, f"k{number}"))
        if number in (30, 70, 110):
            await mortal.kill()
    await there.reconnect()
    total = len(acknowledged) + len(instants)
    over = "select count(*) = %s from run_status where state = 'success'"
    await eventually(lambda: there.value(over, total), 30, pause_seconds=0.05)
    found = await there.rows("select run_id from run where key is not null order by run_id")
    assert [row[0] for row in found] == acknowledged
    fired = await there.rows("select fire_at from run where fire_at is not null order by 1")
    assert [row[0] for row in fired] == instants
    assert all(service.is_alive for service in services), "an outage ends no service"
    assert [event for service in services for event in service.events("session_declared_dead")] == []


@pytest.mark.requirement("N15", "K9", "K3", "K10", "A7")
async def test_tasks_go_on_through_an_outage_and_are_reported_after_it(
    mortal: MortalPostgres, mortal_there: Installation
) -> None:
    """N15, small: longer than the heartbeat, and than the silence after which a runner is given up."""
    there = mortal_there
    runner, scheduler = await there.start("runner", runner_id="r1"), await there.start("scheduler")
    ended_meanwhile, goes_on = [await start_run(there.conn, "holding") for _ in range(2)]
    await eventually(lambda: len([e for e in there.effects() if e.what == "begin"]) == 2)
    bodies = [each for each in there.effects() if each.what == "begin"]
    await mortal.take_down()
    quiet = int(there.settings().lost_after_seconds / there.settings().heartbeat_seconds) + 2
    await eventually(lambda: len(runner.events("database_unreachable", loop="heartbeat")) > quiet, 30)
    let_go(there.effects_file)
    await eventually(lambda: len([e for e in there.effects() if e.what == "end"]) == 2)
    assert scheduler.events("database_unreachable")
    mortal.let_up()
    await there.reconnect()
    assert [await there.ended(run_id) for run_id in (ended_meanwhile, goes_on)] == ["success", "success"]
    assert {each.epoch for each in there.effects()} == {1}
    assert {(e.run_id, e.pid) for e in there.effects() if e.what == "end"} == {(e.run_id, e.pid) for e in bodies}
    assert await there.value("select count(*) from runner where ended_at is not null") == 0


@pytest.mark.requirement("B9")
async def test_services_that_are_started_while_the_database_is_away_wait_for_it(
    mortal: MortalPostgres, mortal_there: Installation
) -> None:
    there = mortal_there
    await mortal.take_down()
    runner, scheduler = there.launch("runner", runner_id="r1"), there.launch("scheduler")
    for service in (runner, scheduler):
        await service.saw("database_unreachable")
    mortal.let_up()
    await there.reconnect()
    await runner.saw("runner_started")
    await scheduler.saw("leadership_acquired")
    assert await there.ended(await start_run(there.conn, "single")) == "success"


@pytest.mark.requirement("N17", "M3", "F3")
async def test_a_trigger_whose_answer_was_lost_is_the_same_run_when_it_is_sent_again(there: Installation) -> None:
    """N17."""
    failpoints.arm("trigger_run:drop_reply:1")
    try:
        client = await connect(there.url, purpose=Purpose.SCHEDULER)
    finally:
        failpoints.disarm()
    with pytest.raises(psycopg.OperationalError):
        await trigger(client, dag="single", params={}, actor=Actor("test"), key="once")
    made = [await trigger(there.conn, dag="single", params={}, actor=Actor("test"), key="once") for _ in range(100)]
    assert {(each.run_id, each.is_new) for each in made} == {(made[0].run_id, False)}
    assert await there.value("select count(*) from run") == 1


@pytest.mark.long
@pytest.mark.requirement("N17", "M2", "F2", "M5", "F5", "I3")
async def test_an_answer_that_is_lost_after_the_commit_changes_nothing(stage: Stage, rehearsed: Rehearsed) -> None:
    """N17: what was committed is not done again, and what was not is."""
    expected, _ = rehearsed
    writes = {
        "runner": [("finish_and_claim", (1, 2, 5, 9)), ("extend_leases", (2,)), ("logs.append", (1,))],
        "scheduler": [
            ("fire_schedules", (1, 2)),
            ("promote_due_tasks", (1,)),
            ("try_acquire_shard", (1,)),
            ("poll_work", (2, 5)),
            ("reconcile_runs", (2,)),
        ],
    }
    sites = [
        [
            Site(service=kind, statement=statement, when=when, number=number)
            for statement, numbers in places
            for number in numbers
            for when in ("drop_reply", "error")
        ]
        for kind, places in writes.items()
    ]
    wrong, reached = await failures(stage, in_pairs(*sites), expected)
    assert not wrong, "\n\n".join(wrong)
    assert len(reached) > sum(map(len, sites)) * 0.8
