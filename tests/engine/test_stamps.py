"""When a task's waits ended is on record: its retry's delay, its gates, the queue. Who has none of these has no stamp."""

from __future__ import annotations

from datetime import datetime

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import overview, tasks
from evertick.db.queries.overview import RunAttempt
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.retry import RetryPolicy
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.remote_attempts import DispatchResult, NotStarted, claim_for_dispatch, end_queued
from evertick.engine.tasks import clear, select_tasks
from tests.engine.remote_agents import as_claim, begin
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, set_clock, start

POOL = GateSpec(kind=GateKind.POOL, name="p", weight=1)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def attempts(conn: AsyncConnection, run_id: int) -> list[RunAttempt]:
    return await overview.attempts_of_run(conn, run_id=run_id, limit=100)


def stamps(each: RunAttempt) -> tuple[datetime | None, datetime | None, float | None, datetime | None]:
    return each.let_in_at, each.taken_at, each.start_seconds, each.retry_at


async def test_a_task_without_gates_has_no_stamp(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"t": []}))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    await runner.drain()
    (only,) = await attempts(conn, run_id)
    assert (only.outcome, stamps(only)) == ("success", (None, None, None, None))


async def test_when_gates_let_in_is_kept_for_every_attempt(conn: AsyncConnection) -> None:
    await set_pool(conn, name="p", slots=1, actor=Actor("test"))
    retry = RetryPolicy(retries=1, delay_seconds=10)
    await put(conn, make_dag("d", {"a": [], "b": []}, task_gates=(POOL,), task_retry=retry))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    (first,) = await runner.claim()
    assert [each.let_in_at for each in await overview.open_tasks_of_run(conn, run_id=run_id, limit=9)] == []
    await set_clock(conn, later(5))
    await runner.finish(first, "failed", retry_in=10, start_in=1.5)
    (other,) = await overview.open_tasks_of_run(conn, run_id=run_id, limit=9)
    assert (other.idx, other.let_in_at) == (1, later(5)), "the other one was let in when this one left"
    await set_clock(conn, later(7))
    (second,) = await runner.claim()
    await set_clock(conn, later(20))
    assert await promote_due_tasks(conn, shard=0, epoch=await lead(conn), limit=10) is not None
    assert await runner.claim() == [], "it waits for the pool"
    await set_clock(conn, later(30))
    await runner.finish(second)
    await set_clock(conn, later(31))
    (again,) = await runner.claim()
    await runner.finish(again)
    failed, succeeded, beside = await attempts(conn, run_id)
    assert stamps(failed) == (later(0), None, 1.5, later(15))
    assert stamps(succeeded) == (later(30), None, None, None)
    assert stamps(beside) == (later(5), None, None, None)
    assert (succeeded.started_at, beside.started_at) == (later(31), later(7))


async def test_when_an_executor_elsewhere_was_asked_is_kept(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"t": []}))
    runner = await Runner.join(conn, executor="far")
    run_id = await start(conn, "d")
    await set_clock(conn, later(3))
    (row,) = await claim_for_dispatch(conn, session=runner.session, queues=["default"], free=1)
    (waits,) = await overview.open_tasks_of_run(conn, run_id=run_id, limit=9)
    assert waits.taken_at == later(3)
    await set_clock(conn, later(4))
    lost = NotStarted(
        key=key_of(as_claim(row)),
        epoch=row.epoch,
        session=row.session,
        kind=DispatchResult.LOST,
        reason="no trace of it",
    )
    await end_queued(conn, [lost], infra_retries=3)
    await set_clock(conn, later(6))
    (row,) = await claim_for_dispatch(conn, session=runner.session, queues=["default"], free=1)
    await set_clock(conn, later(9))
    assert await begin(conn, session=row.session, epoch=row.epoch)
    await Runner(conn, row.session).finish(as_claim(row))
    first, second = await attempts(conn, run_id)
    assert (first.started_at, stamps(first)) == (None, (None, later(3), None, later(4)))
    assert (second.started_at, stamps(second)) == (later(9), (None, later(6), None, None))


async def test_a_cleared_attempt_keeps_its_stamps_and_says_that_nobody_planned_the_next(conn: AsyncConnection) -> None:
    await set_pool(conn, name="p", slots=1, actor=Actor("test"))
    await put(conn, make_dag("d", {"t": []}, task_gates=(POOL,)))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, start_in=0.5)
    await set_clock(conn, later(60))
    await clear(conn, run_id=run_id, chosen=await select_tasks(conn, run_id=run_id, names=["t"]), actor=Actor("test"))
    await set_clock(conn, later(61))
    (claim,) = await runner.claim()
    running = (await attempts(conn, run_id))[1]
    assert running.start_seconds is None, "not known before its end"
    await runner.finish(claim)
    first, second = await attempts(conn, run_id)
    assert stamps(first) == (later(0), None, 0.5, None)
    assert stamps(second) == (later(60), None, None, None)


async def test_what_an_attempt_used_is_kept_for_every_attempt(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"t": []}, task_retry=RetryPolicy(retries=1)))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    (first,) = await runner.claim()
    await runner.finish(first, "failed", cpu=0.5, mem=5 << 30)
    (second,) = await runner.claim()
    used = [(each.cpu_seconds, each.peak_memory_bytes) for each in await tasks.attempts(conn, key_of(first))]
    assert used == [(0.5, 5 << 30), (None, None)], "that of the second is not known before its end"
    await runner.finish(second, cpu=0.25, mem=1)
    await clear(conn, run_id=run_id, chosen=await select_tasks(conn, run_id=run_id, names=["t"]), actor=Actor("test"))
    (third,) = await runner.claim()
    await runner.finish(third, "lost")
    used = [(each.cpu_seconds, each.peak_memory_bytes) for each in await tasks.attempts(conn, key_of(first))]
    assert used == [(0.5, 5 << 30), (0.25, 1), (None, None)]
