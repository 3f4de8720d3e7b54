"""Runs that take longer than their DAG allows and tasks that no runner takes in time: ended by the leader, with a reason."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.domain.errors import NotLeader
from evertick.engine.dags import pause, unpause
from evertick.engine.maintenance import time_out_queued_tasks, time_out_run
from evertick.engine.runners import extend, mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.shards import poll_work
from evertick.engine.tasks import clear, select_tasks
from tests.engine import invariants
from tests.engine.poison import cure, refuse
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, run_state, set_clock, start, states, value
from tests.waiting import eventually

CHAIN: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["b"]}
ONE: dict[str, list[str]] = {"a": []}
MINUTE = {"run_timeout_seconds": 60.0}
PATIENT = {"task_queue_timeout_seconds": 30.0}


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def overdue(conn: AsyncConnection, epoch: int) -> list[int]:
    found = (await poll_work(conn, shard=0, epoch=epoch, lost_after=90)).overdue
    assert found is not None
    return found


async def reason_of(conn: AsyncConnection, run_id: int) -> object:
    return await value(conn, "select reason from run_status where run_id = %s", run_id)


# a run ---------------------------------------------------------------------------------------------------------------


async def test_a_run_that_takes_too_long_fails_and_what_runs_is_asked_to_stop(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("timed", CHAIN, **MINUTE))
    run = await start(conn, "timed")
    (claim,) = await runner.claim()
    await set_clock(conn, later(59.9))
    assert await overdue(conn, epoch) == []
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=run) is None
    await set_clock(conn, later(60))
    assert await overdue(conn, epoch) == [run]
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=run) == 1
    assert await overdue(conn, epoch) == [], "it was asked, and is not asked again and again"
    assert await states(conn, run) == {"a": "running", "b": "canceled", "c": "canceled"}
    asked = await extend(conn, session=runner.session, held=[(key_of(claim), claim.epoch)])
    assert asked.stop == [(key_of(claim), claim.epoch)]
    await runner.finish(claim, "killed", reason="asked to stop")
    assert (await states(conn, run))["a"] == "canceled"
    assert await run_state(conn, run) == "failed"
    assert await reason_of(conn, run) == "run_timeout: exceeded 60 s"
    reasons = {row.task: row.reason for row in await tasks.list_of_run(conn, run_id=run)}
    assert reasons["b"] == "run_timeout: exceeded 60 s"
    assert await value(conn, "select detail->>'reason' from audit_log where action = 'time_out'") == reasons["b"]
    assert await invariants.violations(conn) == []


async def test_a_run_in_which_nothing_runs_fails_at_once(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("timed", CHAIN, **MINUTE))
    run = await start(conn, "timed")
    await set_clock(conn, later(61))
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=run) == 0
    assert (await run_state(conn, run), await value(conn, "select count(*) from ready_task")) == ("failed", 0)


async def test_a_run_that_waits_for_its_turn_has_not_begun(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("timed", ONE, max_active_runs=1, **MINUTE))
    first, second = await start(conn, "timed"), await start(conn, "timed")
    (claim,) = await runner.claim()
    await set_clock(conn, later(61))
    assert await overdue(conn, epoch) == [first]
    await runner.finish(claim)
    assert await run_state(conn, second) == "running"
    assert await overdue(conn, epoch) == [], "its time begins when it starts"


@pytest.mark.requirement("A6")
async def test_a_cleared_run_has_all_its_time_again(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("timed", ONE, **MINUTE))
    run = await start(conn, "timed")
    await runner.drain()
    await set_clock(conn, later(1000))
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    assert await overdue(conn, epoch) == []
    await set_clock(conn, later(1060))
    assert await overdue(conn, epoch) == [run]


async def test_what_is_cleared_in_a_run_that_is_over_its_time_is_stopped_again(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("timed", {"a": [], "b": []}, **MINUTE))
    run = await start(conn, "timed")
    a, _b = await runner.claim()
    await runner.finish(a)
    await set_clock(conn, later(61))
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=run) == 1
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["a"]), actor=Actor("me"))
    assert (await states(conn, run))["a"] == "available"
    assert await overdue(conn, epoch) == [run]


async def test_a_run_that_somebody_canceled_keeps_that_reason(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("timed", CHAIN, **MINUTE))
    run = await start(conn, "timed")
    await runner.claim()
    await cancel(conn, run_id=run, actor=Actor("me"))
    await set_clock(conn, later(61))
    assert await overdue(conn, epoch) == []
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=run) is None


async def test_a_run_keeps_the_limit_of_the_version_it_started_with(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("timed", ONE, **MINUTE))
    limited = await start(conn, "timed")
    await put(conn, make_dag("timed", ONE))
    free = await start(conn, "timed")
    await set_clock(conn, later(61))
    assert await overdue(conn, epoch) == [limited]
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=free) is None


async def test_many_runs_within_their_time_never_hide_one_that_is_over_it(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("other", ONE, run_timeout_seconds=1000.0))
    for _ in range(120):
        await start(conn, "other")
    await put(conn, make_dag("timed", ONE, **MINUTE))
    run = await start(conn, "timed")
    await set_clock(conn, later(61))
    assert await overdue(conn, epoch) == [run]


async def test_losing_its_runner_ends_a_task_that_was_asked_to_stop(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("timed", ONE, **MINUTE))
    run = await start(conn, "timed")
    await runner.claim()
    await set_clock(conn, later(61))
    await time_out_run(conn, shard=0, epoch=epoch, run_id=run)
    await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)
    assert (await states(conn, run), await run_state(conn, run)) == ({"a": "canceled"}, "failed")


# a wait --------------------------------------------------------------------------------------------------------------


async def late(conn: AsyncConnection, epoch: int, batch: int = 100) -> tuple[int, int]:
    done = await time_out_queued_tasks(conn, shard=0, epoch=epoch, limit=batch)
    return done.failed, done.refused


async def test_a_task_that_no_runner_takes_in_time_fails_without_another_try(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    epoch = await lead(conn)
    await put(conn, make_dag("patient", CHAIN, **PATIENT))
    run = await start(conn, "patient")
    seen = await poll_work(conn, shard=0, epoch=epoch, lost_after=90)
    assert seen.next_expiry == later(30)
    await set_clock(conn, later(29.9))
    assert await late(conn, epoch) == (0, 0)
    await set_clock(conn, later(30))
    assert await late(conn, epoch) == (1, 0)
    assert await states(conn, run) == {"a": "failed", "b": "upstream_failed", "c": "upstream_failed"}
    assert await run_state(conn, run) == "failed"
    reason = await value(conn, "select reason from task where idx = 0")
    assert reason == "queue_timeout: no runner of queue default took it within 30 s"
    assert await value(conn, "select count(*) from ready_task") == 0
    assert await invariants.violations(conn) == []


async def test_who_takes_it_takes_the_limit_along(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("patient", CHAIN, **PATIENT))
    await start(conn, "patient")
    (claim,) = await runner.claim()
    await set_clock(conn, later(1000))
    assert await late(conn, epoch) == (0, 0)
    await runner.finish(claim)
    await set_clock(conn, later(1029))
    assert await late(conn, epoch) == (0, 0), "the successor waits since its predecessor ended"
    await set_clock(conn, later(1030))
    assert await late(conn, epoch) == (1, 0)


async def test_a_pause_stops_the_clock_of_what_waits(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("patient", ONE, **PATIENT))
    run = await start(conn, "patient")
    await pause(conn, dag="patient", actor=Actor("me"))
    await set_clock(conn, later(1000))
    assert await late(conn, epoch) == (0, 0)
    await unpause(conn, dag="patient", actor=Actor("me"))
    assert await late(conn, epoch) == (0, 0)
    await set_clock(conn, later(1030))
    assert await late(conn, epoch) == (1, 0)
    assert await states(conn, run) == {"a": "failed"}


async def test_tasks_without_a_limit_wait_for_ever(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("mixed", {"a": [], "b": []}, per_task={"b": {"queue_timeout_seconds": 30.0}}))
    run = await start(conn, "mixed")
    await set_clock(conn, later(1e6))
    assert await late(conn, epoch) == (1, 0)
    assert await states(conn, run) == {"a": "available", "b": "failed"}


@pytest.mark.requirement("D2", "K1")
async def test_a_task_that_a_runner_is_just_taking_stays_with_it(database: str) -> None:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leader,
        await connect(database, purpose=Purpose.SCHEDULER) as other,
    ):
        for conn in (leader, other):
            await set_clock(conn, later(0))
        epoch = await lead(leader)
        await put(leader, make_dag("patient", {"a": [], "b": []}, **PATIENT))
        run = await start(leader, "patient")
        runner = await Runner.join(other)
        await set_clock(leader, later(31))
        async with asyncio.timeout(30), other.transaction():
            (claim,) = await runner.claim(1)
            assert await late(leader, epoch) == (1, 0)
        assert await states(leader, run) == {"a": "running", "b": "failed"}
        assert await runner.finish(claim) == []


async def test_waits_of_a_run_that_somebody_works_on_are_left_for_later(database: str) -> None:
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leader,
        await connect(database, purpose=Purpose.SCHEDULER) as other,
    ):
        await set_clock(leader, later(0))
        epoch = await lead(leader)
        await put(leader, make_dag("patient", ONE, **PATIENT))
        held, _free = await start(leader, "patient"), await start(leader, "patient")
        await set_clock(leader, later(31))
        async with asyncio.timeout(30), other.transaction():
            await other.execute("select from run_status where run_id = %s for no key update", [held])
            assert await late(leader, epoch, batch=1) == (1, 0), "the limit counts what is taken"
        assert await states(leader, held) == {"a": "available"}
        assert await late(leader, epoch) == (1, 0)


# guards --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A4")
async def test_an_old_leader_ends_nothing(conn: AsyncConnection) -> None:
    old = await lead(conn)
    await put(conn, make_dag("timed", ONE, **MINUTE, **PATIENT))
    run = await start(conn, "timed")
    await set_clock(conn, later(100))
    await lead(conn)
    for verb in (time_out_run(conn, shard=0, epoch=old, run_id=run), late(conn, old)):
        async with conn.transaction():
            with pytest.raises(NotLeader):
                async with conn.transaction():
                    await verb
    assert await states(conn, run) == {"a": "available"}


@pytest.mark.requirement("A13", "V11", "A1")
async def test_one_that_cannot_be_ended_keeps_no_other_and_is_tried_again(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("both", ONE, run_timeout_seconds=100.0, **PATIENT))
    made = [await start(conn, "both") for _ in range(20)]
    await set_clock(conn, later(31))
    await refuse(conn, "task", f"new.run_id = {made[7]}")
    assert await late(conn, epoch) == (19, 1)
    assert await late(conn, epoch) == (0, 0), "it is left alone for a while"
    await set_clock(conn, later(101))
    assert await overdue(conn, epoch) == [made[7]]
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=made[7]) == -1
    assert await overdue(conn, epoch) == []
    assert await value(conn, "select failures from quarantine where subject_id = %s", made[7]) == 2
    await cure(conn, "task")
    await set_clock(conn, later(122))
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=made[7]) == 0
    assert await run_state(conn, made[7]) == "failed"


async def test_the_line_is_one_for_all_shards_so_one_leader_ends_all_waits(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("ours", ONE, **PATIENT))
    await put(conn, make_dag("theirs", ONE, **PATIENT))
    await conn.execute("update dag set shard = 1 where name = 'theirs'")
    ours, theirs = await start(conn, "ours"), await start(conn, "theirs")
    await set_clock(conn, later(31))
    assert (await time_out_queued_tasks(conn, shard=0, epoch=epoch, limit=10)).failed == 2
    assert (await states(conn, ours), await states(conn, theirs)) == ({"a": "failed"}, {"a": "failed"})


@pytest.mark.requirement("V4", "V10")
async def test_a_run_that_ends_while_it_is_about_to_be_timed_out_has_ended(database: str) -> None:
    """Whoever reports its last task is before us: what we waited for decides, and nothing is told that did not happen."""
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as conn,
        await connect(database, purpose=Purpose.SCHEDULER) as other,
    ):
        await set_clock(conn, later(0))
        await set_clock(other, later(61))
        epoch = await lead(conn)
        await put(conn, make_dag("one", ONE, **MINUTE))
        run = await start(conn, "one")
        runner = await Runner.join(conn)
        (claim,) = await runner.claim()
        async with conn.transaction():
            await runner.finish(claim)
            ending = asyncio.create_task(time_out_run(other, shard=0, epoch=epoch, run_id=run))
            is_waiting = "select count(*) > 0 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            await eventually(lambda: value(conn, is_waiting))
        assert await ending is None
        assert await run_state(conn, run) == "success"
        assert await value(conn, "select count(*) from audit_log where action = 'time_out'") == 0
