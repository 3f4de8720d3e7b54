"""Guards of what people ask for: cancel, clear, mark, pause, delete. One test per guard; see test_guards.py."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.dags import delete, delete_dag, pause, pause_dag, unpause
from evertick.engine.fire_schedules import plan_if_possible
from evertick.engine.runs import cancel, trigger_run
from evertick.engine.schedules import read_snapshot
from evertick.engine.tasks import ClearedTasks, clear, mark, select_tasks
from tests.engine.world import Runner, key_of, later, make_dag, put, run_state, set_clock, start, states, value

ONE: dict[str, list[str]] = {"a": []}
CHAIN = {"a": [], "b": ["a"], "c": ["b"]}
RETRIED = RetryPolicy(retries=3, delay_seconds=0)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    """One connection is enough here, so nothing is committed."""
    return rollback_conn


async def clear_all(conn: AsyncConnection, run: int) -> ClearedTasks:
    return await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))


async def test_clear_does_not_take_back_a_cancel(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await cancel(conn, run_id=run, actor=Actor("me"))
    assert (await clear_all(conn, run)).asked == 0
    await runner.finish(claim, "killed")
    assert await states(conn, run) == {"a": "canceled"}


async def test_clear_reopens_only_what_has_ended(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    await runner.finish(a)
    cleared = await clear_all(conn, run)
    assert (cleared.reopened, cleared.asked) == (1, 0)
    assert await states(conn, run) == {"a": "available", "b": "waiting", "c": "waiting"}


async def test_what_cannot_run_when_it_is_cleared_ends_again_and_is_not_put_in_line(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    await runner.finish(a, "failed", no_retry=True)
    assert await value(conn, "select count(*) from ready_task") == 0
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["b"]), actor=Actor("me"))
    assert (await states(conn, run))["b"] == "upstream_failed"
    assert await value(conn, "select count(*) from ready_task") == 0


async def test_a_cleared_run_waits_for_its_turn_among_limited_runs(conn: AsyncConnection) -> None:
    await put(conn, make_dag("limited", ONE, max_active_runs=1))
    runner = await Runner.join(conn)
    first = await start(conn, "limited")
    await runner.drain()
    second = await start(conn, "limited")
    await clear_all(conn, first)
    assert (await run_state(conn, first), await states(conn, first)) == ("queued", {"a": "waiting"})
    await runner.drain()
    assert [await run_state(conn, run) for run in (first, second)] == ["success", "success"]


async def test_an_attempt_that_history_has_is_not_kept_twice_by_clear(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE, task_retry=RETRIED))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=9)
    await cancel(conn, run_id=run, actor=Actor("me"))
    await clear_all(conn, run)
    assert await value(conn, "select array_agg(outcome) from attempt") == ["failed"]


async def test_an_attempt_that_history_has_is_not_kept_twice_by_mark(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE, task_retry=RETRIED))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=9)
    await cancel(conn, run_id=run, actor=Actor("me"))
    await mark(conn, key_of(claim), state="success", actor=Actor("me"))
    assert await value(conn, "select array_agg(outcome) from attempt") == ["failed"]


async def test_clear_and_mark_keep_no_attempt_of_a_task_that_never_ran(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    await cancel(conn, run_id=run, actor=Actor("me"))
    await mark(conn, TaskKey(run, 2, -1), state="success", actor=Actor("me"))
    await clear_all(conn, run)
    assert await value(conn, "select count(*) from attempt") == 0


@pytest.mark.parametrize("state", ["success", "failed", "skipped"])
async def test_mark_refuses_what_is_so_already_and_writes_nothing_down(conn: AsyncConnection, state: str) -> None:
    await put(conn, make_dag("one", ONE))
    run = await start(conn, "one")
    await mark(conn, TaskKey(run, 0, -1), state=state, actor=Actor("me"))
    with pytest.raises(Conflict):
        await mark(conn, TaskKey(run, 0, -1), state=state, actor=Actor("me"))
    assert await value(conn, "select count(*) from audit_log where action = 'mark'") == 1


async def test_mark_refuses_a_task_that_the_run_does_not_have(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    run = await start(conn, "one")
    with pytest.raises(Conflict):
        await mark(conn, TaskKey(run, 7, -1), state="success", actor=Actor("me"))


async def test_mark_leaves_alone_what_had_run_below(conn: AsyncConnection) -> None:
    rules = {"c": {"trigger_rule": TriggerRule.ALL_DONE}}
    await put(conn, make_dag("chain", CHAIN, per_task=rules))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    await runner.drain({"a": "failed"})
    assert await states(conn, run) == {"a": "failed", "b": "upstream_failed", "c": "success"}
    await mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("me"))
    assert await states(conn, run) == {"a": "success", "b": "available", "c": "success"}


async def test_mark_in_a_run_that_goes_on_does_not_close_it(conn: AsyncConnection) -> None:
    await put(conn, make_dag("two", {"a": [], "b": []}))
    run = await start(conn, "two")
    for state in ("success", "failed"):
        await mark(conn, TaskKey(run, 0, -1), state=state, actor=Actor("me"))
        assert await run_state(conn, run) == "running"
    await mark(conn, TaskKey(run, 1, -1), state="success", actor=Actor("me"))
    assert await run_state(conn, run) == "failed"


async def test_a_mark_in_a_canceled_run_judges_it_by_its_tasks(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    run = await start(conn, "one")
    await cancel(conn, run_id=run, actor=Actor("me"))
    await mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("me"))
    assert await run_state(conn, run) == "success"


async def test_pausing_twice_is_pausing_once(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    assert [await pause(conn, dag="one", actor=Actor("me")) for _ in range(2)] == [True, False]
    assert [await unpause(conn, dag="one", actor=Actor("me")) for _ in range(2)] == [True, False]
    assert await value(conn, "select count(*) from audit_log where action in ('pause', 'unpause')") == 2


async def test_pausing_one_dag_holds_nothing_of_another(conn: AsyncConnection) -> None:
    for name in ("one", "other"):
        await put(conn, make_dag(name, ONE))
    held, free = await start(conn, "one"), await start(conn, "other")
    await pause(conn, dag="one", actor=Actor("me"))
    assert [await states(conn, run) for run in (held, free)] == [{"a": "pending"}, {"a": "available"}]


async def test_a_run_of_a_paused_dag_has_not_started(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    await pause(conn, dag="one", actor=Actor("me"))
    run = await start(conn, "one")
    assert await run_state(conn, run) == "queued"
    assert await value(conn, "select started_at from run_status where run_id = %s", run) is None


async def test_unpausing_leaves_a_retry_to_its_time(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE, task_retry=RETRIED))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    await set_clock(conn, later(0))
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=60)
    await pause(conn, dag="one", actor=Actor("me"))
    await unpause(conn, dag="one", actor=Actor("me"))
    assert await states(conn, run) == {"a": "pending"}


async def test_deleting_twice_is_deleting_once(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    row = await dags.find(conn, "one")
    assert row is not None
    before = await read_snapshot(conn, dag="one", plan=plan_if_possible, dag_id=row.dag_id)
    assert [await delete_dag(conn, before, actor=Actor("me")) for _ in range(2)] == [True, False]
    assert await value(conn, "select count(*) from audit_log where action = 'delete'") == 1


async def test_a_deleted_dag_is_neither_paused_nor_triggered(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", ONE))
    row = await dags.find(conn, "one")
    assert row is not None
    await delete(conn, dag="one", actor=Actor("me"))
    before = await read_snapshot(conn, dag="one", plan=plan_if_possible, dag_id=row.dag_id)
    assert not await pause_dag(conn, before, paused=True, actor=Actor("me"))
    assert await trigger_run(conn, dag_id=row.dag_id, params={}, key=None, actor=Actor("me")) is None


@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    "move", ["version = version + 1", "next_due = next_due + interval '1 s'", "error = 'broken'", "is_paused = true"]
)
async def test_a_pause_planned_from_what_has_moved_since_is_refused(conn: AsyncConnection, move: str) -> None:
    await put(conn, make_dag("one", ONE, every="@every 60s"))
    row = await dags.find(conn, "one")
    assert row is not None
    before = await read_snapshot(conn, dag="one", plan=plan_if_possible, dag_id=row.dag_id)
    await conn.execute(f"update schedule_state set {move}")
    with pytest.raises(psycopg.Error, match="have moved on"):
        async with conn.transaction():
            await pause_dag(conn, before, paused=True, actor=Actor("me"))
    assert await value(conn, "select is_paused from dag") is False
