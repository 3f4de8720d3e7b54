"""Guards of remote execution that only a second runner, a second connection or a broken row brings to light."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.domain.patterns import read_pattern
from evertick.engine.claim_matching import Matching
from evertick.engine.dispatch import claim_for_dispatch, claim_matching_for_dispatch
from evertick.store.db import Purpose, connect
from evertick.store.dispatch import QueuedRow
from tests.engine.world import Runner, make_dag, put, start, states, value

ANY = Matching([read_pattern("**")], ["default"])


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.PLANNING) as connection:
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
    assert await value(conn, "select count(*) from ready") == 3


@pytest.mark.parametrize("table", ["dispatch", "log_object", "log_watch", "log_walk"])
async def test_a_row_that_is_there_cannot_be_there_twice(rollback_conn: AsyncConnection, table: str) -> None:
    await waiting(rollback_conn, 1)
    await claim(await Runner.join(rollback_conn, executor="far"))
    await rollback_conn.execute("insert into log_object (run_id, bytes) values (1, 1)")
    await rollback_conn.execute("insert into log_watch values (1)")
    await rollback_conn.execute("insert into log_walk (after) values (1)")
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
    run_id = await waiting(conn, 2)
    runner = await Runner.join(other, executor="far")
    async with conn.transaction():
        await conn.execute("select 1 from ready where idx = 0 for update")
        rows = await claim_matching_for_dispatch(other, ANY, session=runner.session, free=9)
        assert [row.idx for row in rows] == [1]
    assert (await states(conn, run_id))["t0"] == "available"
    async with conn.transaction():
        await conn.execute("select 1 from ready where idx = 0 for update")
        assert await claim(runner) == []


async def test_a_place_in_line_whose_task_is_not_available_is_no_claim(rollback_conn: AsyncConnection) -> None:
    run_id = await waiting(rollback_conn, 1)
    await rollback_conn.execute("update task set state = 'pending'")
    assert await claim(await Runner.join(rollback_conn, executor="far")) == []
    assert (await states(rollback_conn, run_id))["t0"] == "pending"
    assert await value(rollback_conn, "select count(*) from dispatch") == 0
