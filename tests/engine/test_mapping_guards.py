"""Guards of mapped tasks and branches, one by one: nothing is expanded, taken back or skipped that has gone on meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, UniqueViolation

from evertick.db.connect import Purpose, connect
from evertick.db.queries import tasks
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.mapping import MapHow, MappedList, Mapping
from evertick.domain.dags.spec import BranchChoice, DagSpec
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import pause
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, key_of, later, make_dag, put, run_state, set_clock, start, states, value
from tests.waiting import eventually

EXPAND = "select expand_task(row(run_id, 1, -1, version_id, 'pending')::task_ref)::text from run where run_id = %s"
MUTEX = GateSpec(kind=GateKind.MUTEX, name="k", weight=EXCLUSIVE)


def mapped(**options: object) -> DagSpec:
    """source >> work (mapped over what it returned) >> gather"""
    over = Mapping(lists=(MappedList(argument="x", task="source"),))
    per_task = {"work": {"mapping": over, **options}}
    return make_dag("mapped", {"source": [], "work": ["source"], "gather": ["work"]}, per_task=per_task)


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def begin(conn: AsyncConnection, dag: DagSpec) -> tuple[int, Runner, ExchangeRow]:
    await put(conn, dag)
    run, runner = await start(conn, dag.name), await Runner.join(conn)
    (first,) = await runner.claim()
    return run, runner, first


async def expanded(conn: AsyncConnection, count: int = 3, **options: object) -> tuple[int, Runner, list[ExchangeRow]]:
    run, runner, source = await begin(conn, mapped(**options))
    claims, _ = await runner.step([(source, "success", {"result": list(range(count))})], free=10)
    return run, runner, claims


async def shown(conn: AsyncConnection, run: int) -> dict[str, str]:
    rows = await tasks.list_of_run(conn, run_id=run, limit=100)
    return {row.task if row.map_index < 0 else f"{row.task}[{row.map_index}]": row.state for row in rows}


@pytest.mark.parametrize(
    ("error", "statement"),
    [
        (CheckViolation, "insert into task_mapping values (-1, 0, 'zip', 0)"),
        (UniqueViolation, "insert into task_mapping select -1, 0, 'zip', 1 from generate_series(1, 2)"),
        (CheckViolation, "insert into mapping_input values (-1, 0, 0, null, null)"),
        (CheckViolation, "insert into mapping_input values (-1, 0, 0, 1, 1)"),
        (UniqueViolation, "insert into mapping_input select -1, 0, 0, 1, null from generate_series(1, 2)"),
        (UniqueViolation, "insert into map_item select -1, 0, 0, '1' from generate_series(1, 2)"),
    ],
)
async def test_the_tables_refuse(db: AsyncConnection, error: type[Exception], statement: str) -> None:
    with pytest.raises(error):
        await db.execute(statement)  # type: ignore[arg-type]


# Expanding ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["ended", "waits for its time"])
async def test_what_is_not_pending_any_more_is_not_expanded(db: AsyncConnection, why: str) -> None:
    run, runner, source = await begin(db, mapped())
    await pause(db, dag="mapped", actor=Actor("test"))
    await runner.finish(source, result=[1, 2])
    if why == "ended":
        await mark(db, TaskKey(run, 1, -1), state="skipped", actor=Actor("test"))
    else:
        await db.execute("update task set not_before = %s where run_id = %s and idx = 1", [later(60), run])
    before = await shown(db, run)
    assert await value(db, EXPAND, run) is None
    assert await shown(db, run) == before


async def test_a_list_of_dicts_is_expanded_into_arguments(db: AsyncConnection) -> None:
    over = Mapping(lists=(MappedList(task="source"),), how=MapHow.KWARGS)
    run, runner, source = await begin(db, mapped(mapping=over))
    claims, _ = await runner.step([(source, "success", {"result": [{"x": 1}, {"x": 2}]})], free=10)
    assert [claim.inputs for claim in claims] == ['{"": [{"x": 1}]}', '{"": [{"x": 2}]}']
    assert (await shown(db, run))["gather"] == "waiting"


async def test_what_has_ended_below_counts_no_more_instances(db: AsyncConnection) -> None:
    run, runner, source = await begin(db, mapped())
    await mark(db, TaskKey(run, 2, -1), state="success", actor=Actor("test"))
    await runner.finish(source, result=[1, 2, 3])
    assert await value(db, "select n_extra from task where run_id = %s and idx = 2", run) is None
    await runner.drain()
    assert await run_state(db, run) == "success"


# Taking back ----------------------------------------------------------------------------------------------------------------


async def clear_all(conn: AsyncConnection, run: int) -> None:
    await clear(
        conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["work", "gather"]), actor=Actor("test")
    )


async def test_an_instance_that_was_canceled_stays_so_when_the_whole_is_cleared(db: AsyncConnection) -> None:
    run, _, claims = await expanded(db, 2)
    await cancel(db, run_id=run, actor=Actor("test"))
    await clear_all(db, run)
    requests = "select array_agg(request::text order by map_index) from task where run_id = %s and idx = 1"
    assert await value(db, requests, run) == ["cancel"] * len(claims)


async def test_instances_that_wait_for_their_gate_or_in_line_leave_it(db: AsyncConnection) -> None:
    run, runner, claims = await expanded(db, 3, gates=(MUTEX,))
    assert len(claims) == 1
    await runner.finish(claims[0], "given_back")
    await clear_all(db, run)
    assert await shown(db, run) == {
        "source": "success",
        "gather": "waiting",
        "work[0]": "available",
        "work[1]": "pending",
        "work[2]": "pending",
    }
    assert await value(db, "select count(*) from ready_task") == 1
    assert await value(db, "select count(*) from gate_waiter") == 2
    assert await invariants.gate_violations(db) == []
    await runner.drain()
    assert await run_state(db, run) == "success"


async def test_what_has_ended_is_history_and_what_waits_for_its_time_is_not_waited_for(db: AsyncConnection) -> None:
    run, runner, claims = await expanded(db, 3, retry=RetryPolicy(retries=1))
    done, failed, running = claims
    await runner.finish(done, result=1)
    await runner.finish(failed, "failed", retry_in=60)
    await clear_all(db, run)
    assert await shown(db, run) == {"source": "success", "work[2]": "running", "gather": "waiting"}
    assert await value(db, "select count(*) from result where idx = 1") == 0
    await runner.finish(running, "killed")
    assert sorted(await shown(db, run)) == ["gather", "source", "work[0]", "work[1]", "work[2]"]
    assert await value(db, "select array_agg(distinct outcome order by outcome) from attempt where idx = 1") is not None
    await runner.drain()
    assert await run_state(db, run) == "success"


async def test_another_mapped_task_of_the_run_keeps_its_instances(db: AsyncConnection) -> None:
    three = Mapping(lists=(MappedList(argument="x", length=3),))
    await put(db, make_dag("two", {"x": [], "y": []}, per_task={"x": {"mapping": three}, "y": {"mapping": three}}))
    run, runner = await start(db, "two"), await Runner.join(db)
    claims = await runner.claim()
    await runner.step([(claim, "failed" if claim.idx == 0 else "success", {}) for claim in claims])
    await clear(db, run_id=run, chosen=await select_tasks(db, run_id=run, names=["x"]), actor=Actor("test"))
    found = await shown(db, run)
    assert {name for name, state in found.items() if state == "success"} == {"y[0]", "y[1]", "y[2]"}
    assert await value(db, "select count(*) from map_item where run_id = %s", run) == 6


# Branches -------------------------------------------------------------------------------------------------------------------

SKIP: dict[str, Any] = {"skip": [1, 2]}


def branching() -> DagSpec:
    shape = {"choose": [], "a": ["choose"], "b": ["choose"], "c": ["choose"]}
    retry = RetryPolicy(retries=1)
    return make_dag("branching", shape, per_task={"choose": {"choice": BranchChoice.BRANCH, "retry": retry}})


@pytest.mark.parametrize("why", ["failed", "asked to stop"])
async def test_an_attempt_that_does_not_succeed_chooses_nothing(db: AsyncConnection, why: str) -> None:
    run, runner, claim = await begin(db, branching())
    if why == "failed":
        await runner.finish(claim, "failed", retry_in=60, **SKIP)
    else:
        chosen = await select_tasks(db, run_id=run, names=["choose"])
        await clear(db, run_id=run, chosen=chosen, actor=Actor("test"))
        await runner.finish(claim, "success", **SKIP)
    found = await states(db, run)
    assert (found["a"], found["b"]) == ("waiting", "waiting")


async def test_what_has_been_decided_already_stays_whatever_a_branch_chooses(db: AsyncConnection) -> None:
    run, runner, claim = await begin(db, branching())
    await mark(db, TaskKey(run, 1, -1), state="success", actor=Actor("test"))
    await runner.finish(claim, "success", **SKIP)
    found = await states(db, run)
    assert (found["a"], found["b"], found["c"]) == ("success", "skipped", "available")


async def test_whoever_takes_a_branch_away_is_waited_for_before_it_chooses(
    conn: AsyncConnection, database: str
) -> None:
    run, runner, claim = await begin(conn, branching())
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        async with other.transaction():
            await mark(other, key_of(claim), state="failed", actor=Actor("test"))
            finishing = asyncio.ensure_future(runner.finish(claim, "success", **SKIP))
            waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
            await eventually(lambda: value(other, waits, conn.info.backend_pid))
        await finishing
    assert (await states(conn, run))["a"] == "upstream_failed"
