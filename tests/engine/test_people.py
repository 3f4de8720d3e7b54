"""cancel, clear, mark, pause and delete: explicit, recorded, and never two bodies of one task at once."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runs, tasks
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.dags import delete, pause, unpause
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.runs import cancel, trigger
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import (
    T0,
    Runner,
    key_of,
    later,
    lead,
    make_dag,
    names_of,
    put,
    run_state,
    set_clock,
    start,
    states,
    value,
)

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


@pytest.fixture(autouse=True)
async def watched(conn: AsyncConnection) -> object:
    """Illegal moves raise at once; after each test nothing may be violated."""
    await invariants.install(conn)
    yield
    assert await invariants.violations(conn) == []


async def test_canceling_ends_what_has_not_started_and_asks_the_running_to_stop(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", {"a": [], "b": ["a"], "other": []}))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim(1)
    assert await cancel(conn, run_id=run, actor=Actor("ann")) == 1
    assert await states(conn, run) == {"a": "running", "b": "canceled", "other": "canceled"}
    assert await run_state(conn, run) == "running"
    await runner.finish(claim, "killed", reason="stop requested")
    assert await states(conn, run) == {"a": "canceled", "b": "canceled", "other": "canceled"}
    assert await run_state(conn, run) == "canceled"
    assert await runner.claim() == []


async def test_a_run_that_has_ended_cannot_be_canceled(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    await (await Runner.join(conn)).drain()
    with pytest.raises(Conflict, match="already ended"):
        await cancel(conn, run_id=run, actor=Actor("ann"))
    with pytest.raises(NotFound, match="no run 999"):
        await cancel(conn, run_id=999, actor=Actor("ann"))


async def test_canceling_a_queued_run_ends_it_at_once(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}, max_active_runs=1))
    await start(conn, "one")
    second = await start(conn, "one")
    assert await run_state(conn, second) == "queued"
    await cancel(conn, run_id=second, actor=Actor("ann"))
    assert await run_state(conn, second) == "canceled"


async def test_clearing_runs_a_task_and_what_follows_it_again(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    await runner.drain({"b": "failed"})
    chosen = await select_tasks(conn, run_id=run, only_failed=True)
    assert [row.task for row in chosen] == ["b", "c"]
    done = await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"))
    assert (done.reopened, done.asked) == (2, 0)
    assert await states(conn, run) == {"a": "success", "b": "available", "c": "waiting"}
    assert await run_state(conn, run) == "running"
    assert await runner.drain() == ["b", "c"]
    assert await run_state(conn, run) == "success"
    history = await tasks.attempts(conn, TaskKey(run, 1, -1))
    assert [(row.epoch, row.outcome) for row in history] == [(1, "failed"), (2, "success")]
    entries = await runs.journal(conn, run_id=run)
    assert [(entry.verb, entry.actor) for entry in entries] == [("clear", "ann")]


async def test_clearing_one_task_leaves_its_finished_successors_alone(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    await runner.drain()
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["a"]), actor=Actor("ann"))
    assert await runner.drain() == ["a"]
    assert await run_state(conn, run) == "success"


async def test_a_running_task_is_cleared_only_when_its_owner_confirms(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    done = await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("ann"))
    assert (done.reopened, done.asked) == (0, 1)
    assert await runner.claim() == []
    await runner.finish(claim, "killed")
    (again,) = await runner.claim()
    assert (again.epoch, again.attempt) == (2, 1)


async def test_an_unknown_task_is_refused_with_the_name_that_was_meant(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"extract": []}))
    run = await start(conn, "one")
    with pytest.raises(NotFound, match="Did you mean 'extract'"):
        await select_tasks(conn, run_id=run, names=["extrct"])


async def test_marking_a_failed_task_lets_what_it_blocked_go_on(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    await runner.drain({"a": "failed"})
    assert await mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("ann")) == "marked"
    assert await states(conn, run) == {"a": "success", "b": "available", "c": "waiting"}
    assert await runner.drain() == ["b", "c"]
    assert await run_state(conn, run) == "success"


async def test_marking_the_last_task_of_a_failed_run_judges_the_run_anew(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    await (await Runner.join(conn)).drain({"a": "failed"})
    await mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("ann"))
    assert await run_state(conn, run) == "success"
    await mark(conn, TaskKey(run, 0, -1), state="failed", actor=Actor("ann"))
    assert await run_state(conn, run) == "failed"


async def test_marking_a_waiting_task_decides_its_successors(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    await mark(conn, TaskKey(run, 1, -1), state="success", actor=Actor("ann"))
    assert await states(conn, run) == {"a": "available", "b": "success", "c": "available"}


async def test_a_running_task_is_marked_when_its_owner_confirms(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    assert await mark(conn, key_of(claim), state="skipped", actor=Actor("ann")) == "asked"
    assert await states(conn, run) == {"a": "running"}
    await runner.finish(claim, "killed")
    assert await states(conn, run) == {"a": "skipped"}


async def test_a_task_cannot_be_marked_running(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    with pytest.raises(UserError, match="cannot be marked 'running'"):
        await mark(conn, TaskKey(run, 0, -1), state="running", actor=Actor("ann"))
    with pytest.raises(Conflict):
        await mark(conn, TaskKey(run, 7, -1), state="success", actor=Actor("ann"))


async def test_a_paused_dag_offers_nothing_until_it_goes_on(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    assert await pause(conn, dag="chain", actor=Actor("ann"))
    assert not await pause(conn, dag="chain", actor=Actor("ann"))
    await runner.finish(claim)
    assert (await states(conn, run))["b"] == "pending"
    assert await runner.claim() == []
    held = (await trigger(conn, dag="chain", params={}, actor=Actor("ann"))).run_id
    assert await run_state(conn, held) == "queued"
    assert await unpause(conn, dag="chain", actor=Actor("ann"))
    assert await runner.drain() == ["b", "a", "c", "b", "c"]
    assert await run_state(conn, run) == await run_state(conn, held) == "success"


async def test_pausing_takes_available_tasks_out_of_the_line(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    await pause(conn, dag="one", actor=Actor("ann"))
    assert await states(conn, run) == {"a": "pending"}
    assert await value(conn, "select count(*) from ready_task") == 0


async def test_a_pause_walks_over_a_long_line_once(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    for name in ("one", "other"):
        await put(conn, make_dag(name, {"a": []}))
        for _ in range(150):
            await start(conn, name)
    read = "select idx_tup_fetch + coalesce(seq_tup_read, 0) from pg_stat_xact_user_tables where relname = 'ready_task'"
    before = await value(conn, read)
    assert await pause(conn, dag="one", actor=Actor("ann"))
    after = await value(conn, read)
    assert isinstance(before, int) and isinstance(after, int) and 150 <= after - before <= 900
    assert await value(conn, "select count(*) from ready_task") == 150
    assert (
        await value(
            conn,
            "select count(*) from ready_task q join run r using (run_id) join dag d using (dag_id) where d.name = 'one'",
        )
        == 0
    )
    assert await value(conn, "select count(*) from task where state = 'pending'") == 150


async def test_a_retry_that_comes_due_while_its_dag_is_paused_waits_for_the_unpause(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    await put(conn, make_dag("one", {"a": []}, task_retry=RetryPolicy(retries=1)))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=5)
    await pause(conn, dag="one", actor=Actor("ann"))
    await set_clock(conn, later(10))
    assert (await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)).promoted == 0
    assert await states(conn, run) == {"a": "pending"}
    await unpause(conn, dag="one", actor=Actor("ann"))
    assert await states(conn, run) == {"a": "available"}


async def test_limited_runs_start_one_after_the_other_oldest_first(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}, max_active_runs=1))
    first, second, third = [await start(conn, "one") for _ in range(3)]
    runner = await Runner.join(conn)
    for run in (first, second, third):
        assert await run_state(conn, run) == "running"
        (claim,) = await runner.claim()
        assert claim.run_id == run
        await runner.finish(claim)


async def test_a_deleted_dag_cannot_be_triggered_but_its_open_runs_go_on(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    assert await delete(conn, dag="chain", actor=Actor("ann"))
    with pytest.raises(NotFound, match="no DAG 'chain'"):
        await trigger(conn, dag="chain", params={}, actor=Actor("ann"))
    assert await (await Runner.join(conn)).drain() == ["a", "b", "c"]
    assert await run_state(conn, run) == "success"


@pytest.mark.requirement("M3", "F3")
async def test_triggering_with_the_same_key_a_hundred_times_makes_one_run(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    made = [await trigger(conn, dag="one", params={}, actor=Actor("ann"), key="nightly") for _ in range(100)]
    assert len({each.run_id for each in made}) == 1
    assert [each.is_new for each in made] == [True] + [False] * 99
    assert await value(conn, "select count(*) from run") == 1


async def test_clearing_takes_back_what_its_end_had_let_in_and_has_not_started(conn: AsyncConnection) -> None:
    """It would run before the task whose result it was to get."""
    await put(conn, make_dag("d", {"a": [], "b": ["a"], "other": []}))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    first, other = await runner.claim()
    await runner.finish(first)
    assert await states(conn, run) == {"a": "success", "b": "available", "other": "running"}
    chosen = [row for row in await select_tasks(conn, run_id=run) if row.task == "a"]
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"))
    assert await states(conn, run) == {"a": "available", "b": "waiting", "other": "running"}
    assert await value(conn, "select count(*) from ready_task") == 1
    await runner.finish(other)
    assert await runner.drain() == ["a", "b"]
    assert await run_state(conn, run) == "success"


async def test_clearing_leaves_a_task_that_a_runner_has_taken_and_one_that_may_start_anyway(
    conn: AsyncConnection,
) -> None:
    easy = {"trigger_rule": TriggerRule.ONE_SUCCESS}
    shape = {"a": [], "b": [], "taken": ["a"], "easy": ["a", "b"], "other": []}
    await put(conn, make_dag("d", shape, per_task={"easy": easy}))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    a, b, _other = await runner.claim()
    await runner.step([(a, "success", {}), (b, "success", {})])
    (taken,) = await runner.claim(1)
    chosen = [row for row in await select_tasks(conn, run_id=run) if row.task == "a"]
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"))
    found = await states(conn, run)
    assert (found["a"], found["taken"], found["easy"]) == ("available", "running", "available")
    assert await value(conn, "select count(*) from ready_task") == 2
    assert await runner.finish(taken) == []


async def test_clearing_takes_back_a_task_that_waits_for_its_retry_or_its_gates(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await set_pool(conn, name="p", slots=1, actor=Actor("ann"))
    gated = {"gates": (GateSpec(kind=GateKind.POOL, name="p"),)}
    again = {"retry": RetryPolicy(retries=1, delay_seconds=60)}
    shape = {"a": [], "full": [], "retries": ["a"], "waits": ["a"]}
    await put(conn, make_dag("d", shape, per_task={"full": gated, "waits": gated, "retries": again}))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    claims = await runner.claim()
    names = await names_of(conn, claims)
    await runner.finish(claims[names.index("a")])
    (second,) = await runner.claim()
    await runner.finish(second, "failed", retry_in=60)
    assert await states(conn, run) == {"a": "success", "full": "running", "retries": "pending", "waits": "pending"}
    chosen = [row for row in await select_tasks(conn, run_id=run) if row.task == "a"]
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"))
    assert await states(conn, run) == {"a": "available", "full": "running", "retries": "waiting", "waits": "waiting"}
    assert await value(conn, "select count(*) from gate_waiter") == 0
    await set_clock(conn, later(100))
    epoch = await lead(conn)
    await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10, bound=None)
    assert (await states(conn, run))["retries"] == "waiting"
    await runner.finish(claims[names.index("full")])
    assert sorted(await runner.drain()) == ["a", "retries", "waits"]
