"""Guards of runners: heartbeats, the end of one that is gone, late log lines. One test per guard; see test_guards.py."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import logs, runners
from evertick.db.queries.logs import NewChunk
from evertick.db.queries.runners import NewRunner
from evertick.domain.retry import RetryPolicy
from evertick.engine.runners import extend, mark_runner_dead
from tests.engine.world import Runner, key_of, make_dag, put, start, states, value

ONE: dict[str, list[str]] = {"a": []}
THREE: dict[str, list[str]] = {"a": [], "b": [], "c": []}
CHAIN = {"a": [], "b": ["a"]}
RETRIED = RetryPolicy(retries=3, delay_seconds=0)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    """One connection is enough here, so nothing is committed."""
    return rollback_conn


async def one_task(conn: AsyncConnection, **options: object) -> int:
    await put(conn, make_dag("one", ONE, **options))
    return await start(conn, "one")


# extend --------------------------------------------------------------------------------------------------------------


async def test_extend_is_the_heartbeat_of_one_runner_only(conn: AsyncConnection) -> None:
    mine, other = await Runner.join(conn), await Runner.join(conn)
    await extend(conn, session=mine.session, held=[])
    beats = "select array_agg(heartbeat_seq order by session) from runner where session = any(%s)"
    assert await value(conn, beats, [mine.session, other.session]) == [1, 0]


async def test_extend_asks_to_stop_nothing_that_nobody_wants_stopped(conn: AsyncConnection) -> None:
    await put(conn, make_dag("three", THREE))
    await start(conn, "three")
    mine, other = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await mine.claim(1)
    await other.claim()
    reply = await extend(conn, session=mine.session, held=[(key_of(claim), claim.epoch)])
    assert (reply.lost, reply.stop, reply.unknown, reply.is_gone) == ([], [], [], False)


async def test_extend_reports_to_a_dead_runner_that_its_session_ended(conn: AsyncConnection) -> None:
    mine, _other = await Runner.join(conn), await Runner.join(conn)
    await mark_runner_dead(conn, session=mine.session, reason="gone", infra_retries=3)
    assert (await extend(conn, session=mine.session, held=[])).is_gone
    assert await value(conn, "select heartbeat_seq from runner where session = %s", mine.session) == 0


# the end of a runner -------------------------------------------------------------------------------------------------


async def test_mark_dead_takes_tasks_from_the_dead_runner_only(conn: AsyncConnection) -> None:
    await put(conn, make_dag("three", THREE))
    await start(conn, "three")
    gone, alive = await Runner.join(conn), await Runner.join(conn)
    await gone.claim(1)
    await alive.claim(1)
    assert await mark_runner_dead(conn, session=gone.session, reason="gone", infra_retries=3) == 1
    assert [runner.session for runner in await runners.live(conn)] == [alive.session]
    assert await value(conn, "select array_agg(session) from lease") == [alive.session]


@pytest.mark.requirement("A8")
async def test_who_buries_second_changes_nothing(conn: AsyncConnection) -> None:
    run = await one_task(conn)
    runner = await Runner.join(conn)
    await runner.claim()
    held = [
        await mark_runner_dead(conn, session=runner.session, reason=reason, infra_retries=3)
        for reason in ("first", "second")
    ]
    assert (held, await states(conn, run)) == ([1, 0], {"a": "available"})
    await runners.leave(conn, runner.session)
    assert await value(conn, "select end_reason from runner where session = %s", runner.session) == "first"


async def test_registering_again_after_a_lost_reply_registers_once(conn: AsyncConnection) -> None:
    runner = NewRunner(
        session=7,
        runner_id="r",
        host="h",
        boot_id="b",
        pid_namespace="p",
        pid=1,
        pid_started=0.0,
        queues=["q"],
        slots=1,
    )
    for _ in range(2):
        await runners.register(conn, runner)
    assert [live.session for live in await runners.live(conn)] == [7]


async def test_deregistering_ends_one_runner_only(conn: AsyncConnection) -> None:
    gone, alive = await Runner.join(conn), await Runner.join(conn)
    await runners.leave(conn, gone.session)
    assert [runner.session for runner in await runners.live(conn)] == [alive.session]


# logs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("F8")
async def test_log_lines_are_late_unless_the_session_holds_that_very_attempt(conn: AsyncConnection) -> None:
    await one_task(conn)
    owner, other = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await owner.claim()

    async def append(session: int, epoch: int, seq: int) -> None:
        chunk = NewChunk(key=key_of(claim), epoch=epoch, seq=seq, until=seq + 1, content="x")
        await logs.append(conn, session=session, chunks=[chunk, chunk])

    await append(owner.session, claim.epoch, 0)
    await append(other.session, claim.epoch, 1)
    await append(owner.session, claim.epoch + 1, 2)
    assert await value(conn, "select array_agg(is_late order by seq) from log_chunk") == [False, True, True]
