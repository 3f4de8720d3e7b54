"""What the database knows of runners: what is asked of them, who their neighbours are, and when silence counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from evertick.domain.access import Actor
from evertick.domain.attempt import RunnerRequest
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.runners import drain, extend, mark_runner_dead, undrain
from evertick.engine.shards import observe_heartbeats
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start, states, value

ONE: dict[str, list[str]] = {"a": []}
SOMEBODY = NewRunner(
    session=1, runner_id="r", host="h", boot_id="b", pid_namespace="p", pid=1, pid_started=0.0, queues=["q"], slots=1
)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    """One connection is enough here, so nothing is committed."""
    return rollback_conn


async def asked_of(conn: AsyncConnection, runner: Runner) -> RunnerRequest | None:
    return (await extend(conn, session=runner.session, held=[])).request


# what people ask of a runner ---------------------------------------------------------------------------------------


async def test_what_is_asked_comes_with_the_heartbeat_until_it_is_taken_back(conn: AsyncConnection) -> None:
    mine, other = await Runner.join(conn), await Runner.join(conn)
    assert await asked_of(conn, mine) is None
    for then_leave, request in ((False, RunnerRequest.DRAIN), (True, RunnerRequest.LEAVE)):
        assert await drain(conn, sessions=[mine.session], actor=Actor("ann"), then_leave=then_leave) == [mine.session]
        assert (await asked_of(conn, mine), await asked_of(conn, other)) == (request, None)
    assert await undrain(conn, sessions=[mine.session], actor=Actor("bob")) == [mine.session]
    assert await asked_of(conn, mine) is None
    kept = "select array_agg(concat_ws(' ', action, actor, detail->>'request') order by entry_id) from audit_log"
    assert await value(conn, kept) == ["drain ann drain", "drain ann leave", "undrain bob"]


async def test_asking_twice_is_asking_once_and_the_dead_are_not_asked(conn: AsyncConnection) -> None:
    mine, gone = await Runner.join(conn), await Runner.join(conn)
    await runners.leave(conn, gone.session)
    sessions = [mine.session, gone.session]
    assert [await drain(conn, sessions=sessions, actor=Actor("ann")) for _ in range(2)] == [[mine.session], []]
    assert await value(conn, "select count(*) from audit_log where action = 'drain'") == 1
    assert await value(conn, "select request from runner where session = %s", gone.session) is None


async def test_a_session_that_registers_again_is_the_same_and_one_that_is_gone_goes_once(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    mine = await Runner.join(conn)
    await runners.register(conn, replace(SOMEBODY, session=mine.session))
    assert await value(conn, "select array_agg(runner_id) from runner") == [f"r{mine.session}"]
    for seconds in (10, 20):
        await set_clock(conn, later(seconds))
        await runners.leave(conn, mine.session)
    assert await value(conn, "select ended_at from runner") == later(10)


async def test_a_heartbeat_of_a_dead_runner_returns_only_its_end(conn: AsyncConnection) -> None:
    mine = await Runner.join(conn)
    await drain(conn, sessions=[mine.session], actor=Actor("ann"))
    await mark_runner_dead(conn, session=mine.session, reason="gone", infra_retries=3)
    reply = await extend(conn, session=mine.session, held=[])
    assert (reply.is_gone, reply.request) == (True, None)


async def test_a_heartbeat_says_when_it_was(conn: AsyncConnection) -> None:
    mine = await Runner.join(conn)
    await set_clock(conn, later(100))
    await extend(conn, session=mine.session, held=[])
    assert await value(conn, "select heartbeat_at from runner where session = %s", mine.session) == later(100)


# who can prove a death -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("V5")
async def test_peers_are_alive_and_of_the_same_host_boot_and_namespace(conn: AsyncConnection) -> None:
    for session, changes in enumerate(({}, {}, {"host": "x"}, {"boot_id": "x"}, {"pid_namespace": "x"}), 1):
        await runners.register(conn, replace(SOMEBODY, session=session, **changes))  # type: ignore[arg-type]
    await runners.leave(conn, 2)
    found = await runners.peers(conn, host="h", boot_id="b", pid_namespace="p")
    assert [each.session for each in found] == [1]


@pytest.mark.requirement("K5")
async def test_namesakes_are_others_that_live_under_the_same_id(conn: AsyncConnection) -> None:
    for session, runner_id in ((1, "r"), (2, "r"), (3, "r"), (4, "other")):
        await runners.register(conn, replace(SOMEBODY, session=session, runner_id=runner_id))
    await runners.leave(conn, 3)
    assert [each.session for each in await runners.namesakes(conn, runner_id="r", session=1)] == [2]


# when silence counts -------------------------------------------------------------------------------------------------


async def silent_for(conn: AsyncConnection, seconds: int, *, lost_after: float) -> list[int]:
    epoch = await lead(conn)
    for _ in range(seconds):
        told = (
            await observe_heartbeats(conn, shard=0, epoch=epoch, elapsed=1.0, lost_after=lost_after)
        ).silent_sessions
    return told


@pytest.mark.requirement("B6", "A7")
async def test_a_claim_counts_as_a_heartbeat(conn: AsyncConnection) -> None:
    """However long its runner has been silent: a new attempt is never judged by what was before it."""
    await set_clock(conn, later(0))
    await put(conn, make_dag("one", ONE))
    await start(conn, "one")
    idle, claiming = await Runner.join(conn), await Runner.join(conn)
    assert await silent_for(conn, 4, lost_after=5.0) == []
    await set_clock(conn, later(4))
    assert len(await claiming.claim()) == 1
    assert await silent_for(conn, 2, lost_after=5.0) == [idle.session]
    await set_clock(conn, later(4) + timedelta(seconds=5))
    assert sorted(await silent_for(conn, 1, lost_after=5.0)) == sorted([idle.session, claiming.session])


@pytest.mark.requirement("A7", "K3")
async def test_nobody_gives_a_runner_up_before_the_time_that_it_counts_on(conn: AsyncConnection) -> None:
    """It stops what must not outlive its contact by its own setting; another machine's may be shorter."""
    await runners.register(conn, replace(SOMEBODY, lost_after_seconds=10.0))
    assert await silent_for(conn, 10, lost_after=5.0) == []
    assert await silent_for(conn, 1, lost_after=5.0) == [1]


# what follows a loss -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("B2", "K4")
async def test_losses_wait_longer_each_time_and_end_the_task_when_they_are_too_many(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    run, epoch = await start(conn, "one"), await lead(conn)
    waits = []
    for number in range(4):
        now, runner = later(1000 * number), await Runner.join(conn)
        await set_clock(conn, now)
        await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)
        assert [claim.epoch for claim in await runner.claim()] == [number + 1]
        await mark_runner_dead(conn, session=runner.session, reason="agent_lost: test", infra_retries=3)
        not_before = await value(conn, "select not_before from task")
        waits.append((not_before - now).total_seconds() if isinstance(not_before, datetime) else 0.0)
    assert waits == [0.0, 5.0, 10.0, 0.0]
    assert (await states(conn, run), await value(conn, "select reason from task")) == (
        {"a": "failed"},
        "agent_lost: test",
    )
    assert await value(conn, "select attempt from task") == 1, "none of them was one of the user's attempts"
