"""Guards of remote execution that only a second runner, a second connection or a broken row brings to light."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries.runners import QueuedRow
from evertick.domain.agent_protocol import AgentIdentity, TokenUse
from evertick.domain.attempt import TaskKey
from evertick.domain.routing import read_pattern
from evertick.engine.finish_and_claim import PatternClaims
from evertick.engine.remote_attempts import (
    DispatchResult,
    NotStarted,
    adopt_dispatches,
    claim_for_dispatch,
    claim_matching_for_dispatch,
    end_queued,
    start_attempt,
)
from tests.engine.world import Runner, make_dag, put, start, states, value
from tests.waiting import eventually

ANY = PatternClaims([read_pattern("**")], ["default"])
AGENT = {
    "runner_id": "et-1",
    "version": "1",
    "host": "pod",
    "boot_id": "b",
    "pid_namespace": "n",
    "uid": 0,
    "pid": 1,
    "pid_started": 1.0,
}


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as connection:
        # Whoever waits here waits for what it should have skipped.
        await connection.execute("set lock_timeout = '100ms'")
        yield connection


async def claim(runner: Runner, free: int = 100) -> list[QueuedRow]:
    return await claim_for_dispatch(runner.conn, session=runner.session, queues=["default"], free=free)


async def waiting(conn: AsyncConnection, tasks: int) -> int:
    await put(conn, make_dag("d", {f"t{n}": [] for n in range(tasks)}))
    return await start(conn, "d")


@pytest.mark.requirement("K8")
async def test_each_runner_counts_its_own_attempts_against_its_own_slots(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    await waiting(conn, 9)
    large = await Runner.join(conn, executor="far", slots=5)
    small = await Runner.join(conn, executor="far", slots=1)
    assert len(await claim(small)) == 1 and await claim(small) == []
    assert len(await claim(large)) == 5 and await claim(large) == []
    assert await value(conn, "select count(*) from ready_task") == 3


@pytest.mark.parametrize("table", ["dispatch", "log_archive_object", "log_archive_queue", "log_archive_cursor"])
async def test_a_row_that_is_there_cannot_be_there_twice(rollback_conn: AsyncConnection, table: str) -> None:
    await waiting(rollback_conn, 1)
    await claim(await Runner.join(rollback_conn, executor="far"))
    await rollback_conn.execute("insert into log_archive_object (run_id, bytes) values (1, 1)")
    await rollback_conn.execute("insert into log_archive_queue values (1)")
    await rollback_conn.execute("insert into log_archive_cursor (after) values (1)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await rollback_conn.execute(f"insert into {table} select * from {table}")


@pytest.mark.parametrize("column", ["epoch", "session"])
async def test_an_attempt_has_one_row_and_a_session_of_its_own(rollback_conn: AsyncConnection, column: str) -> None:
    """Each of the two keys alone, with the other one changed."""
    await waiting(rollback_conn, 1)
    await claim(await Runner.join(rollback_conn, executor="far"))
    names = ["run_id", "idx", "map_index", "epoch", "session", "executor", "owner", "queue", "queued_at"]
    given = [f"{name} + 1" if name == column else name for name in names]
    with pytest.raises(psycopg.errors.UniqueViolation):
        await rollback_conn.execute(
            f"insert into dispatch ({', '.join(names)}) select {', '.join(given)} from dispatch"
        )


async def test_a_claim_locks_its_own_runner_and_no_other(conn: AsyncConnection, other: AsyncConnection) -> None:
    await waiting(conn, 1)
    neighbour = await Runner.join(conn, executor="far")
    runner = await Runner.join(other, executor="far")
    async with conn.transaction():
        await conn.execute("select 1 from runner where session = %s for update", [neighbour.session])
        assert len(await claim(runner)) == 1


async def test_what_somebody_else_holds_in_line_is_passed_over_and_not_waited_for(
    conn: AsyncConnection, other: AsyncConnection
) -> None:
    run_id = await waiting(conn, 3)
    runner = await Runner.join(other, executor="far")
    async with conn.transaction():
        await conn.execute("select 1 from ready_task where idx = 0 for update")
        assert [row.idx for row in await claim(runner, 1)] == [1], "the next one instead"
        rows = await claim_matching_for_dispatch(other, ANY, session=runner.session, free=9)
        assert [row.idx for row in rows] == [2]
    assert (await states(conn, run_id))["t0"] == "available"
    async with conn.transaction():
        await conn.execute("select 1 from ready_task where idx = 0 for update")
        assert await claim(runner) == []


async def test_what_somebody_works_on_is_adopted_later(conn: AsyncConnection, other: AsyncConnection) -> None:
    await waiting(conn, 2)
    lost = await Runner.join(conn, executor="far")
    await claim(lost)
    await conn.execute("update runner set ended_at = clock()")
    runner = await Runner.join(other, executor="far")
    async with conn.transaction():
        await conn.execute("select 1 from dispatch where idx = 0 for update")
        assert await adopt_dispatches(other, session=runner.session, silent_seconds=30, most=100) == 1
    assert await value(conn, "select array_agg(owner order by idx) from dispatch") == [lost.session, runner.session]


async def begins(conn: AsyncConnection, row: QueuedRow) -> object:
    bearer = AgentIdentity(use=TokenUse.START, key=key_of(row), epoch=row.epoch, session=row.session, expires_at=0)
    return await start_attempt(conn, bearer, nonce="n" * 32, agent=AGENT, lost_after=300.0)


async def ends(conn: AsyncConnection, row: QueuedRow) -> object:
    lost = NotStarted(key=key_of(row), epoch=row.epoch, session=row.session, kind=DispatchResult.LOST, reason="lost")
    return await end_queued(conn, [lost], infra_retries=3)


def key_of(row: QueuedRow) -> TaskKey:
    return TaskKey(row.run_id, row.idx, row.map_index)


@pytest.mark.parametrize("verb", [begins, ends])
async def test_the_run_is_locked_before_an_attempt_is_touched(
    conn: AsyncConnection, other: AsyncConnection, verb: Callable[[AsyncConnection, QueuedRow], Awaitable[object]]
) -> None:
    await waiting(conn, 1)
    (row,) = await claim(await Runner.join(conn, executor="far"))
    await other.execute("set lock_timeout = 0")
    async with conn.transaction():
        await conn.execute("select from run_status for no key update")
        doing = asyncio.ensure_future(verb(other, row))
        await eventually(lambda: value(conn, "select 1 from pg_locks where not granted and pid = %s", pid_of(other)))
        await conn.execute("select from task for update nowait")
        await conn.execute("select from dispatch for update nowait")
    await doing


def pid_of(conn: AsyncConnection) -> int:
    return conn.info.backend_pid


async def test_a_place_in_line_whose_task_is_not_available_is_no_claim(rollback_conn: AsyncConnection) -> None:
    run_id = await waiting(rollback_conn, 1)
    await rollback_conn.execute("update task set state = 'pending'")
    assert await claim(await Runner.join(rollback_conn, executor="far")) == []
    assert (await states(rollback_conn, run_id))["t0"] == "pending"
    assert await value(rollback_conn, "select count(*) from dispatch") == 0
