"""Schedules change by compare-and-set, survive restarts, and a run is judged by the policy that it started with."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection
from psycopg.errors import InFailedSqlTransaction, SerializationFailure

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import Conflict
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.dags import pause
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.schedules import put_schedule
from tests.engine import invariants
from tests.engine.world import T0, Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value


def every(text: str, name: str = "extra") -> NamedSchedule:
    return NamedSchedule(name=name, spec=parse_schedule(text))


@pytest.mark.requirement("R1", "O1", "M1")
async def test_a_schedule_is_put_read_back_and_fires(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("one", {"a": []}))
    assert (
        await put_schedule(conn, dag="one", schedule=every("@every 10s"), actor=Actor("ann"), expected_version=0) == 1
    )
    once = NamedSchedule(name="single", spec=parse_schedule(later(15)))
    assert await put_schedule(conn, dag="one", schedule=once, actor=Actor("ann")) == 1
    listed = {row.name: row.next_due for row in await schedules.list_all(conn, dag="one")}
    assert listed == {"extra": later(10), "single": later(15)}
    await set_clock(conn, later(20))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    await set_clock(conn, later(30))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    cursor = await conn.execute(
        "select c.name, count(*) from run r join schedule c using (schedule_id) group by 1 order by 1"
    )
    assert await cursor.fetchall() == [("extra", 3), ("single", 1)]


@pytest.mark.requirement("I1", "M1")
async def test_of_many_writers_with_one_expected_version_one_wins(database: str) -> None:
    rivals = [await connect(database, purpose=Purpose.SCHEDULER) for _ in range(6)]
    try:
        await put(rivals[0], make_dag("one", {"a": []}))
        for expected in (0, 1, 2):
            tries = [
                put_schedule(
                    rival, dag="one", schedule=every(f"@every {n + 5}s"), actor=Actor("x"), expected_version=expected
                )
                for n, rival in enumerate(rivals)
            ]
            answers = await asyncio.gather(*tries, return_exceptions=True)
            assert [answer for answer in answers if answer == expected + 1] == [expected + 1]
            assert sum(isinstance(answer, Conflict) for answer in answers) == 5
    finally:
        for rival in rivals:
            await rival.close()


@pytest.mark.requirement("F1")
async def test_a_put_repeated_after_a_lost_reply_changes_once(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    for _ in range(3):
        made = await put_schedule(
            conn, dag="one", schedule=every("@every 9s"), actor=Actor("ann"), expected_version=0, request="r-1"
        )
        assert made == 1
    with pytest.raises(Conflict, match="is at version 1, not at 0"):
        await put_schedule(
            conn, dag="one", schedule=every("@every 9s"), actor=Actor("bob"), expected_version=0, request="r-2"
        )
    with pytest.raises(Conflict, match="does not exist"):
        await put_schedule(
            conn, dag="one", schedule=every("@every 9s", "other"), actor=Actor("bob"), expected_version=4
        )


async def test_a_put_settles_what_was_due_under_the_old_version(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await set_clock(conn, T0)
    await put(conn, make_dag("one", {"a": []}))
    await put_schedule(conn, dag="one", schedule=every("@every 10s"), actor=Actor("ann"))
    await set_clock(conn, later(12))
    assert (
        await put_schedule(conn, dag="one", schedule=every("@every 60s"), actor=Actor("ann"), expected_version=1) == 2
    )
    assert await value(conn, "select fire_at from run") == later(10)
    assert await value(conn, "select next_due from schedule_state") == later(60)
    assert await invariants.violations(conn) == []


async def test_a_schedule_that_somebody_put_is_not_removed_by_publishing(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}, every="@every 5s"))
    await put_schedule(conn, dag="one", schedule=every("@every 9s"), actor=Actor("ann"))
    await put_schedule(conn, dag="one", schedule=every("@every 7s", "main"), actor=Actor("ann"))
    await put(conn, make_dag("one", {"a": [], "b": ["a"]}, every="@every 5s"))
    assert {row.name: row.spec["every_seconds"] for row in await schedules.list_all(conn)} == {"extra": 9, "main": 7}


@pytest.mark.requirement("S3", "R7", "S4")
async def test_state_survives_a_new_connection_and_views_can_be_made_again(database: str) -> None:
    async with await connect(database, purpose=Purpose.SCHEDULER) as conn:
        await set_clock(conn, T0)
        epoch = await lead(conn)
        await put(conn, make_dag("one", {"a": [], "b": ["a"]}, every="@every 10s"))
        await set_clock(conn, later(10))
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
        await pause(conn, dag="one", actor=Actor("ann"))
        seen = await states(conn, 1)
    async with await connect(database, purpose=Purpose.SCHEDULER) as conn:
        (row,) = await schedules.list_all(conn)
        assert (row.next_due, row.last_fired, row.paused) == (later(20), later(10), True)
        definition = await value(conn, "select pg_get_viewdef('all_tasks'::regclass)")
        await conn.execute("drop view all_tasks")
        await conn.execute(f"create view all_tasks as {definition}")  # type: ignore[arg-type]
        assert await states(conn, 1) == seen == {"a": "pending", "b": "waiting"}


@pytest.mark.requirement("M6", "F6")
async def test_the_retry_policy_of_a_run_is_the_one_it_started_with(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}, task_retry=RetryPolicy(retries=1, delay_seconds=0)))
    old = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await put(conn, make_dag("one", {"a": []}, task_retry=RetryPolicy(retries=0)))
    await runner.finish(claim, "failed")
    assert await states(conn, old) == {"a": "available"}
    new = await start(conn, "one")
    for claim in await runner.claim():
        await runner.finish(claim, "failed")
    assert (await run_state(conn, old), await run_state(conn, new)) == ("failed", "failed")
    assert await value(conn, "select count(*) from all_attempts where run_id = %s", old) == 2
    assert await value(conn, "select count(*) from all_attempts where run_id = %s", new) == 1


@pytest.mark.requirement("E2")
async def test_a_claim_from_a_stale_reading_takes_nothing(database: str) -> None:
    """A reader whose snapshot is old sees the task as available; claiming it must fail, not start it twice."""
    async with (
        await connect(database, purpose=Purpose.RUNNER) as fresh,
        await connect(database, purpose=Purpose.RUNNER) as stale,
    ):
        await put(fresh, make_dag("one", {"a": []}))
        await start(fresh, "one")
        first, second = await Runner.join(fresh), await Runner.join(stale)
        await stale.execute("begin isolation level repeatable read")
        assert await value(stale, "select count(*) from ready_task") == 1
        assert len(await first.claim()) == 1
        with pytest.raises((SerializationFailure, InFailedSqlTransaction)):
            await second.claim()
        await stale.execute("rollback")
        assert await second.claim() == []


@pytest.mark.requirement("O2", "O3", "O4", "O5", "E1")
async def test_any_node_may_create_claim_and_complete_and_one_locked_run_holds_up_no_other(database: str) -> None:
    nodes = [await connect(database, purpose=Purpose.RUNNER) for _ in range(3)]
    try:
        await put(nodes[0], make_dag("one", {"a": []}))
        locked, free = await start(nodes[1], "one"), await start(nodes[2], "one")
        runner = await Runner.join(nodes[0])
        claims = {claim.run_id: claim for claim in await runner.claim()}
        await nodes[1].execute("begin")
        await nodes[1].execute("select 1 from run_status where run_id = %s for update", [locked])
        anywhere = Runner(nodes[2], runner.session)
        assert await anywhere.finish(claims[free], "failed") == []
        assert await run_state(nodes[2], free) == "failed"
        await nodes[1].execute("rollback")
        assert await anywhere.finish(claims[locked]) == []
        assert await run_state(nodes[0], locked) == "success"
    finally:
        for node in nodes:
            await node.close()
