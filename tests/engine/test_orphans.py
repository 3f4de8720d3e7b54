"""The reaper of orphaned runs: it fails a run in which nothing can move and from which nothing follows, and no other (A6)."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runs, tasks
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotLeader
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TERMINAL_TASK_STATES, TaskState
from evertick.engine.dags import pause
from evertick.engine.maintenance import fail_orphaned_run, reconcile_runs
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.poison import cure, refuse
from tests.engine.subject import Subject, place_subject
from tests.engine.world import Runner, key_of, later, lead, make_dag, put, run_state, set_clock, start, states, value

AFTER = 300.0
CHAIN: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["b"]}


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def stuck_run(conn: AsyncConnection, name: str = "stuck") -> tuple[int, Runner]:
    """Its first task has ended, and the second waits for one more than there are: as after a damaged version."""
    version = await put(conn, make_dag(name, CHAIN))
    run, runner = await start(conn, name), await Runner.join(conn)
    await conn.execute("update task_spec set upstream_total = 2 where version_id = %s and idx = 1", [version])
    claims = [claim for claim in await runner.claim() if claim.run_id == run]
    await runner.finish(claims[0])
    assert await states(conn, run) == {"a": "success", "b": "waiting", "c": "waiting"}
    return run, runner


async def watch(conn: AsyncConnection, epoch: int, *rounds: float) -> None:
    """So many rounds, each so many seconds after the one before."""
    for elapsed in rounds:
        done = await reconcile_runs(conn, shard=0, epoch=epoch, limit=1000, elapsed=elapsed)
        assert (done.last, done.refused) == ((0, 0), 0)


async def reap(conn: AsyncConnection, epoch: int, run_id: int) -> str:
    return await fail_orphaned_run(conn, shard=0, epoch=epoch, run_id=run_id, after=AFTER)


async def listed(conn: AsyncConnection) -> list[int]:
    return await runs.orphans(conn, shard=0, orphan_after=AFTER)


@pytest.mark.requirement("A6", "B4", "N32", "V7")
async def test_a_run_in_which_nothing_can_move_fails_after_the_threshold(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    epoch = await lead(conn)
    run, _ = await stuck_run(conn)
    await watch(conn, epoch, 0, 299.9)
    assert await listed(conn) == []
    assert await reap(conn, epoch, run) == "moved"
    await watch(conn, epoch, 0, 150, 150)
    assert await listed(conn) == [run]
    assert await reap(conn, epoch, run) == "reaped"
    assert await states(conn, run) == {"a": "success", "b": "failed", "c": "failed"}
    row = await runs.find(conn, run)
    assert row is not None and (row.state, row.open_tasks) == ("failed", 0)
    assert row.reason == "orphaned: nothing in it could move for 300 s"
    assert {each.reason for each in await tasks.list_of_run(conn, run_id=run) if each.state == "failed"} == {row.reason}
    assert [entry.verb for entry in await runs.journal(conn, run_id=run)] == ["reap"]
    assert await listed(conn) == []
    assert await invariants.violations(conn) == []


@pytest.mark.requirement("A6", "N32", "V5")
@pytest.mark.parametrize("state", [state for state in TaskState if state not in TERMINAL_TASK_STATES])
async def test_one_task_that_can_move_keeps_its_run_alive(conn: AsyncConnection, state: TaskState) -> None:
    """Retrying, deferred, running, in line, asked by a pause to wait: all of them can."""
    subject = await place_subject(conn, state)
    await _complete(subject, state)
    await watch(conn, subject.leader, 0, 1000, 1000)
    assert await listed(conn) == []
    assert await reap(conn, subject.leader, subject.run_id) == "moved"
    assert await run_state(conn, subject.run_id) == "running"


async def _complete(subject: Subject, state: TaskState) -> None:
    """What else belongs to a task in that state, so that it is sound."""
    conn = subject.conn
    if state is not TaskState.AVAILABLE:
        await conn.execute("delete from ready_task where run_id = %s", [subject.run_id])
    if state is not TaskState.RUNNING:
        await conn.execute("delete from lease where run_id = %s", [subject.run_id])
    if state is TaskState.PENDING:
        await pause(conn, dag="chain", actor=Actor("me"))


@pytest.mark.requirement("A6")
@pytest.mark.parametrize("state", sorted(TERMINAL_TASK_STATES))
async def test_where_all_tasks_have_ended_reconcile_closes_the_run_with_what_they_give(
    conn: AsyncConnection, state: TaskState
) -> None:
    subject = await place_subject(conn, state)
    await conn.execute("delete from ready_task")
    await conn.execute("delete from lease")
    await conn.execute(
        "insert into task (run_id, idx, version_id, state, finished_at) values (%s, 2, %s, %s, clock())"
        " on conflict (run_id, idx, map_index) do update set state = excluded.state, finished_at = clock()",
        [subject.run_id, subject.version_id, state],
    )
    await watch(conn, subject.leader, 0)
    is_bad = state in ("failed", "canceled", "upstream_failed")
    assert await run_state(conn, subject.run_id) == ("failed" if is_bad else "success")
    assert await value(conn, "select reason from run_status where run_id = %s", subject.run_id) is None


@pytest.mark.requirement("A6")
async def test_a_retry_delay_longer_than_the_threshold_is_no_orphan(conn: AsyncConnection) -> None:
    epoch, runner = await lead(conn), await Runner.join(conn)
    await put(conn, make_dag("patient", CHAIN, task_retry=RetryPolicy(retries=1)))
    run = await start(conn, "patient")
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=100_000)
    await watch(conn, epoch, 0, 1000, 1000)
    assert (await listed(conn), await reap(conn, epoch, run)) == ([], "moved")


@pytest.mark.requirement("A6")
async def test_time_in_which_nobody_looked_does_not_count(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    await stuck_run(conn)
    await watch(conn, epoch, 0, 200)
    await set_clock(conn, later(1e6))
    epoch = await lead(conn)
    await watch(conn, epoch, 0)
    assert await listed(conn) == []


@pytest.mark.requirement("A6")
async def test_a_cleared_run_is_never_reaped_for_its_past(conn: AsyncConnection) -> None:
    """Even if it gets stuck at the same place again before anybody looks."""
    epoch = await lead(conn)
    run, runner = await stuck_run(conn)
    await watch(conn, epoch, 0, 400)
    assert await listed(conn) == [run]
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["a"]), actor=Actor("me"))
    (claim,) = await runner.claim()
    await runner.finish(claim)
    assert await reap(conn, epoch, run) == "moved"
    await watch(conn, epoch, 200)
    assert (await listed(conn), await run_state(conn, run)) == ([], "running")


@pytest.mark.requirement("A6")
async def test_a_run_that_somebody_has_marked_starts_to_wait_anew(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    run, _ = await stuck_run(conn)
    await watch(conn, epoch, 0, 400)
    await mark(conn, TaskKey(run, 1, -1), state="success", actor=Actor("me"))
    assert await reap(conn, epoch, run) == "moved"
    assert (await states(conn, run))["c"] == "available"


@pytest.mark.requirement("A6", "V5")
async def test_a_run_that_can_be_repaired_after_all_is_not_reaped(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    run, _ = await stuck_run(conn)
    await watch(conn, epoch, 0, 400)
    await conn.execute("update task_spec set upstream_total = 1 where idx = 1")
    assert await reap(conn, epoch, run) == "moved"
    assert (await states(conn, run))["b"] == "available"


async def test_a_run_that_ended_is_forgotten(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    run, _ = await stuck_run(conn)
    await watch(conn, epoch, 0, 400)
    for idx in (1, 2):
        await mark(conn, TaskKey(run, idx, -1), state="failed", actor=Actor("me"))
    assert await run_state(conn, run) == "failed"
    await watch(conn, epoch, 0)
    assert await value(conn, "select count(*) from orphan_watch") == 0
    assert await reap(conn, epoch, run) == "moved"


@pytest.mark.requirement("B4")
async def test_what_a_reaped_run_failed_of_is_counted_by_its_last_tasks_alone(conn: AsyncConnection) -> None:
    """Two tasks of the chain fail, of which one is the last, and another last one had ended well."""
    epoch = await lead(conn)
    version = await put(conn, make_dag("wide", {**CHAIN, "alone": []}))
    run, runner = await start(conn, "wide"), await Runner.join(conn)
    await conn.execute("update task_spec set upstream_total = 2 where version_id = %s and idx = 1", [version])
    for claim in await runner.claim():
        await runner.finish(claim)
    await watch(conn, epoch, 0, 400)
    assert await reap(conn, epoch, run) == "reaped"
    assert await states(conn, run) == {"a": "success", "b": "failed", "c": "failed", "alone": "success"}
    assert await value(conn, "select failed_leaves from run_status where run_id = %s", run) == 1


@pytest.mark.requirement("A13", "N23", "A14")
async def test_one_that_cannot_be_failed_keeps_no_other_and_is_tried_again(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    made = [(await stuck_run(conn, f"stuck{number}"))[0] for number in range(5)]
    await watch(conn, epoch, 0, 400)
    await refuse(conn, "run_status", f"new.run_id = {made[2]} and new.state = 'failed'")
    assert [await reap(conn, epoch, run) for run in await listed(conn)] == [
        "reaped",
        "reaped",
        "refused",
        "reaped",
        "reaped",
    ]
    assert await states(conn, made[2]) == {"a": "success", "b": "waiting", "c": "waiting"}
    assert await listed(conn) == [], "it is left alone for a while"
    await cure(conn, "run_status")
    await set_clock(conn, later(11))
    assert await listed(conn) == [made[2]]
    assert await reap(conn, epoch, made[2]) == "reaped"


@pytest.mark.requirement("A4")
async def test_an_old_leader_reaps_nothing(conn: AsyncConnection) -> None:
    old = await lead(conn)
    run, _ = await stuck_run(conn)
    await watch(conn, old, 0, 400)
    await lead(conn)
    async with conn.transaction():
        with pytest.raises(NotLeader):
            async with conn.transaction():
                await reap(conn, old, run)
    assert await run_state(conn, run) == "running"


async def test_the_next_run_starts_in_the_place_of_the_one_that_was_reaped(conn: AsyncConnection) -> None:
    epoch = await lead(conn)
    version = await put(conn, make_dag("limited", CHAIN, max_active_runs=1))
    stuck, next_one = await start(conn, "limited"), await start(conn, "limited")
    runner = await Runner.join(conn)
    await conn.execute("update task_spec set upstream_total = 2 where version_id = %s and idx = 1", [version])
    (claim,) = await runner.claim()
    assert key_of(claim).run_id == stuck
    await runner.finish(claim)
    await watch(conn, epoch, 0, 400)
    assert await reap(conn, epoch, stuck) == "reaped"
    assert await run_state(conn, next_one) == "running"
