"""Whatever an interrupted step could leave is rebuilt from the tasks themselves, counted and written down."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runs
from evertick.domain.retry import RetryPolicy
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from tests.engine import invariants
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


async def repair(conn: AsyncConnection) -> list[str]:
    epoch = await lead(conn)
    done = await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)).repaired == []
    assert await invariants.violations(conn) == []
    return done.repaired


@pytest.fixture
async def diamond(conn: AsyncConnection) -> int:
    """A run with a done, b running, c available, d waiting."""
    await invariants.install(conn)
    await put(conn, make_dag("diamond", DIAMOND, task_retry=RetryPolicy(retries=1)))
    run = await start(conn, "diamond")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.step([(claim, "success", {})], free=1)
    assert await states(conn, run) == {"a": "success", "b": "running", "c": "available", "d": "waiting"}
    return run


async def test_a_healthy_run_needs_no_repair(conn: AsyncConnection, diamond: int) -> None:
    assert await repair(conn) == []
    assert await runs.journal(conn, run_id=diamond) == []


@pytest.mark.parametrize(
    ("damage", "repaired"),
    [
        ("delete from ready_task", "available_not_offered"),
        ("delete from lease", "lease_missing"),
        ("delete from task", "run_without_tasks"),
        ("update run_status set open_tasks = 7", "run_counter_drift"),
        ("update run_status set failed_leaves = 7", "run_counter_drift"),
    ],
)
async def test_damage_is_repaired_and_recorded(conn: AsyncConnection, diamond: int, damage: str, repaired: str) -> None:
    if "from task" in damage:
        await conn.execute("delete from lease")
        await conn.execute("delete from ready_task")
    await conn.execute(damage)  # type: ignore[arg-type]
    assert repaired in await repair(conn)
    assert [entry.verb for entry in await runs.journal(conn, run_id=diamond)] == ["reconcile"]
    assert await run_state(conn, diamond) == "running"


async def test_a_lease_of_somebody_else_is_none(conn: AsyncConnection) -> None:
    await lead(conn)
    await put(conn, make_dag("one", {"a": []}))
    run, owner, other = await start(conn, "one"), await Runner.join(conn), await Runner.join(conn)
    await owner.claim()
    examined = "select inspect_run(%s, 0)"
    assert await value(conn, examined, run) == "sound"
    await conn.execute("update lease set session = %s", [other.session])
    assert await value(conn, examined, run) == "drifted"


async def test_a_drifted_upstream_counter_is_counted_anew_and_decided(conn: AsyncConnection) -> None:
    await put(conn, make_dag("join", {"a": [], "b": [], "c": ["a", "b"]}))
    run = await start(conn, "join")
    runner = await Runner.join(conn)
    a, b = await runner.claim()
    await runner.finish(a)
    await invariants.install(conn)
    await conn.execute("update task set n_success = 0 where idx = 2")
    assert "upstream_counter_drift" in await repair(conn)
    await conn.execute("update task set n_success = -1 where idx = 2")
    await runner.finish(b)
    assert (await states(conn, run))["c"] == "waiting"
    await repair(conn)
    assert (await states(conn, run))["c"] == "available"


async def test_an_upstream_end_that_was_never_counted_is_found(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", {"a": [], "b": ["a"]}))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    await runner.finish(a)
    await invariants.install(conn)
    await conn.execute("delete from ready_task")
    await conn.execute("delete from task where idx = 1")
    assert "uncounted_upstream" in await repair(conn)
    assert await states(conn, run) == {"a": "success", "b": "available"}


async def test_a_run_whose_tasks_have_all_ended_is_closed(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    await (await Runner.join(conn)).drain({"a": "failed"})
    await conn.execute(
        "update run_status set state = 'running', open_tasks = 1, failed_leaves = 0, finished_at = null where run_id = %s",
        [run],
    )
    await invariants.install(conn)
    assert await repair(conn) == ["run_not_closed"]
    assert await run_state(conn, run) == "failed"


async def test_a_retry_whose_timer_was_lost_still_comes(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}, task_retry=RetryPolicy(retries=1)))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=30)
    await invariants.install(conn)
    await conn.execute("delete from task_timer")
    assert await repair(conn) == ["timer_missing"]
    await set_clock(conn, later(60))
    epoch = await lead(conn)
    assert (await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)).promoted == 1
    assert await states(conn, run) == {"a": "available"}


async def test_a_queued_run_that_was_passed_over_is_admitted(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    await conn.execute("delete from ready_task")
    await conn.execute("delete from task")
    await conn.execute("update run_status set state = 'queued', started_at = null")
    await invariants.install(conn)
    await repair(conn)
    assert await run_state(conn, run) == "running"
    assert await states(conn, run) == {"a": "available"}


async def test_reconciling_goes_through_all_runs_slice_by_slice(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    made = [await start(conn, "one") for _ in range(5)]
    await conn.execute("delete from ready_task")
    epoch, after, slices = await lead(conn), (0, 0), 0
    while True:
        done = await reconcile_runs(conn, shard=0, epoch=epoch, after_dag=after[0], after_run=after[1], limit=2)
        slices += 1
        if done.last == (0, 0):
            break
        after = done.last
    assert slices == 3
    assert len(await (await Runner.join(conn)).claim()) == len(made)
