"""Guards of planning: leadership, promoting, repairing, and each unique key. One test per guard; see test_guards.py."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags, shards
from evertick.domain.access import Actor
from evertick.domain.errors import Conflict
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.runs import cancel
from evertick.engine.shards import acquire_shard, release_shard, renew_shard
from evertick.engine.tasks import clear, select_tasks
from tests.engine.plans import ONE, fire_plan, plan, scheduled
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

RETRIED = RetryPolicy(retries=3, delay_seconds=0)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    """One connection is enough here, so nothing is committed."""
    return rollback_conn


# leadership ----------------------------------------------------------------------------------------------------------


async def test_only_the_current_epoch_renews_and_resigns(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    old = await acquire_shard(conn, shard=0, owner="old", seconds=5)
    assert old is not None
    await set_clock(conn, later(10))
    new = await acquire_shard(conn, shard=0, owner="new", seconds=5)
    assert new == old + 1
    assert not await renew_shard(conn, shard=0, epoch=old, seconds=100)
    assert not await release_shard(conn, shard=0, epoch=old)
    leader = await shards.leader(conn, shard=0)
    assert leader is not None and (leader.owner, leader.lease_until) == ("new", later(15))


async def test_who_has_resigned_cannot_renew(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await release_shard(conn, shard=0, epoch=epoch)
    assert not await renew_shard(conn, shard=0, epoch=epoch, seconds=100)


async def test_a_lease_that_lasts_is_not_taken(conn: AsyncConnection) -> None:
    await lead(conn)
    assert await acquire_shard(conn, shard=0, owner="other", seconds=5) is None


# promote -------------------------------------------------------------------------------------------------------------


async def test_promote_leaves_what_is_not_due_yet(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await set_clock(conn, later(0))
    await put(conn, make_dag("one", ONE, task_retry=RETRIED))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=10)
    await set_clock(conn, later(9))
    answer = await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)
    assert (answer.promoted, answer.next_due, await states(conn, run)) == (0, later(10), {"a": "pending"})


async def test_promote_goes_by_the_time_that_the_task_waits_for_now(conn: AsyncConnection) -> None:
    """A timer that a cancel and a clear have left behind promotes nothing."""
    epoch = await lead(conn)
    await set_clock(conn, later(0))
    await put(conn, make_dag("one", ONE, task_retry=RETRIED))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    for seconds in (5, 9):
        (claim,) = await runner.claim()
        await runner.finish(claim, "failed", retry_in=seconds)
        if seconds == 5:
            await cancel(conn, run_id=run, actor=Actor("me"))
            await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    await set_clock(conn, later(6))
    assert (await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)).promoted == 0
    assert await states(conn, run) == {"a": "pending"}
    await set_clock(conn, later(10))
    assert (await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)).promoted == 1


# reconcile -----------------------------------------------------------------------------------------------------------


async def test_reconcile_admits_nothing_of_a_paused_dag(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("one", ONE))
    await pause(conn, dag="one", actor=Actor("me"))
    run = await start(conn, "one")
    await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)
    assert await run_state(conn, run) == "queued"


async def test_reconcile_closes_a_canceled_run_as_canceled(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await put(conn, make_dag("one", ONE))
    run = await start(conn, "one")
    await conn.execute("update task set state = 'canceled', finished_at = clock()")
    await conn.execute("update run_status set cancel_requested = true")
    await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)
    assert await run_state(conn, run) == "canceled"


async def test_reconcile_finds_nothing_to_repair_in_any_healthy_state(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await set_clock(conn, later(0))
    shape = {"ends": [], "runs": [], "lines": [], "retries": [], "below": ["ends", "runs"], "last": ["below"]}
    urgent = {name: {"priority": 9 - number} for number, name in enumerate(shape)}
    await put(conn, make_dag("busy", shape, per_task=urgent, task_retry=RETRIED))
    await put(conn, make_dag("one", ONE))
    run, lone = await start(conn, "busy"), await start(conn, "one")
    runner = await Runner.join(conn)
    ends, _runs, _lines, retries = await runner.claim(4)
    await runner.finish(ends, result=1)
    await runner.finish(retries, "failed", retry_in=60)
    before = await states(conn, run), await states(conn, lone)
    done = await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)
    assert done.repaired == []
    assert (await states(conn, run), await states(conn, lone)) == before


# unique keys ---------------------------------------------------------------------------------------------------------

KEYED = [
    "bundle",
    "dag_version",
    "task_spec",
    "edge",
    "task_input",
    "shard",
    "schedule_state",
    "skip_record",
    "run_status",
]
KEYED += ["task", "ready_task", "lease", "task_timer", "attempt", "result", "log_chunk", "runner", "import_error"]


@pytest.fixture
async def full(conn: AsyncConnection) -> AsyncConnection:
    """Every table has a row."""
    epoch, schedule = await scheduled(conn)
    await fire_plan(conn, epoch, plan(schedule))
    await put(conn, make_dag("two", {"a": [], "b": ["a"]}, per_task={"b": {"inputs": ("a",)}}, task_retry=RETRIED))
    for key in ("k", None, None):
        await start(conn, "two", key=key)
    runner = await Runner.join(conn)
    one, two, _three = await runner.claim(3)
    await runner.step([(one, "success", {"result": 1, "log": "x"}), (two, "failed", {"retry_in": 5})])
    await dags.put_import_error(conn, file="f.py", line=1, message="bad", detail="")
    return conn


@pytest.mark.parametrize("table", KEYED)
async def test_a_row_that_is_there_cannot_be_there_twice(full: AsyncConnection, table: str) -> None:
    assert await value(full, f"select count(*) from {table}")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await full.execute(f"insert into {table} overriding system value select * from {table}")


# The id is the database's own here; what must be unique is the rest.
NAMED = {
    "dag": "(name, file) select name, file",
    "schedule": "(dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)"
    " select dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at",
    "dag_version": "(dag_id, number, hash, bundle_hash, spec, task_count, created_at)"
    " select dag_id, number, 'other', bundle_hash, spec, task_count, created_at",
    "run": "(dag_id, version_id, kind, key, schedule_id, fire_at, params, triggered_by, created_at)"
    " select dag_id, version_id, kind, key, schedule_id, fire_at, params, triggered_by, created_at",
}


@pytest.mark.parametrize("table", NAMED)
async def test_a_name_that_is_taken_cannot_be_taken_twice(full: AsyncConnection, table: str) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation):
        await full.execute(f"insert into {table} {NAMED[table]} from {table}")


async def test_an_ended_run_is_told_apart_from_one_that_never_was(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    run = await start(conn, "one")
    await (await Runner.join(conn)).drain()
    with pytest.raises(Conflict):
        await cancel(conn, run_id=run, actor=Actor("me"))
    assert await value(conn, "select cancel_requested from run_status where run_id = %s", run) is False
