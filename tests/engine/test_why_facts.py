"""What `why` counts and names, one by one: only what really stands before the task, on its own gate, queue, key and DAG."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import gates
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.params import declare_params
from evertick.domain.retry import RetryPolicy
from evertick.engine.runners import drain
from evertick.engine.runs import trigger
from tests.engine.world import Runner, later, make_dag, put, set_clock, start, value


def mutex(key: str) -> GateSpec:
    return GateSpec(kind=GateKind.MUTEX, name=key, weight=EXCLUSIVE)


@pytest.fixture
async def db(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def reasons(conn: AsyncConnection, run: int, idx: int = 0) -> list[tuple[str, dict[str, Any]]]:
    return [(each.kind, dict(each.detail)) for each in await gates.explain_task(conn, TaskKey(run, idx, -1))]


async def only(conn: AsyncConnection, run: int, idx: int = 0) -> dict[str, Any]:
    ((_, detail),) = await reasons(conn, run, idx)
    return detail


async def test_the_runner_that_has_the_task_is_named_and_no_other(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"t": []}))
    run = await start(db, "a")
    _, owner, _ = [await Runner.join(db) for _ in range(3)]
    await owner.claim()
    assert (await only(db, run))["runner"] == f"r{owner.session}"


async def test_a_quarantined_row_explains_its_own_run_and_dag_until_its_next_try(db: AsyncConnection) -> None:
    await Runner.join(db)
    for name in ("a", "b"):
        await put(db, make_dag(name, {"t": []}))
    first, second, other = await start(db, "a"), await start(db, "a"), await start(db, "b")
    await db.execute("select quarantine_row('run', %s, 'reconcile', 'poison', true)", [first])
    await db.execute("update quarantine set retry_at = %s", [later(10)])

    async def kinds() -> list[list[str]]:
        return [[kind for kind, _ in await reasons(db, run)] for run in (first, second, other)]

    assert await kinds() == [["quarantined", "in_line"], ["in_line"], ["in_line"]]
    await set_clock(db, later(10))
    assert await kinds() == [["in_line"]] * 3
    dag = await value(db, "select dag_id from dag where name = 'a'")
    await db.execute("select quarantine_row('dag', %s, 'admit', 'poison', true)", [dag])
    await db.execute("update quarantine set retry_at = null")
    assert await kinds() == [["quarantined", "quarantined", "in_line"], ["quarantined", "in_line"], ["in_line"]]


async def test_a_queued_run_counts_those_that_run_and_those_queued_before_it(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"t": []}, max_active_runs=1))
    await put(db, make_dag("b", {"t": []}))
    runner = await Runner.join(db)
    await start(db, "a")
    await runner.drain()
    for name in ("b", "a", "a"):
        await start(db, name)
    asked = await start(db, "a")
    await start(db, "a")
    detail = await only(db, asked)
    assert (detail["active"], detail["ahead"]) == (1, 1)


async def test_only_the_upstream_that_has_not_ended_is_waited_for(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"x": [], "y": [], "z": ["x", "y"]}))
    run = await start(db, "a")
    runner = await Runner.join(db)
    (x,) = [claim for claim in await runner.claim() if claim.idx == 0]
    await runner.finish(x)
    assert (await only(db, run, 2))["task"] == "y"


async def test_retries_that_are_due_before_it_are_ahead(db: AsyncConnection) -> None:
    await put(db, make_dag("a", {"t": []}, task_retry=RetryPolicy(retries=1)))
    run = await start(db, "a")
    (claim,) = await (runner := await Runner.join(db)).claim()
    await runner.finish(claim, "failed", retry_in=50)
    await set_clock(db, later(100))
    place = "insert into retry_queue select shard, 'default', %s, %s, 0, -1 from dag"
    for number, seconds in enumerate((40, 45, 60)):
        await db.execute(place, [later(seconds), 1_000_000 + number])
    ((kind, detail),) = await reasons(db, run)
    assert (kind, detail["ahead"]) == ("retry_line", 2)


async def test_those_in_line_before_it_are_ahead(db: AsyncConnection) -> None:
    await Runner.join(db)
    await put(db, make_dag("a", {"t": []}))
    await put(db, make_dag("urgent", {"t": []}, task_priority=9))
    _, asked, _ = [await start(db, "a") for _ in range(3)]
    assert (await only(db, asked))["ahead"] == 1
    await start(db, "urgent")
    assert (await only(db, asked))["ahead"] == 2


async def test_those_who_wait_for_the_same_gate_before_it_are_ahead(db: AsyncConnection) -> None:
    for key in ("j", "k"):
        await put(db, make_dag(key, {"t": []}, task_gates=(mutex(key),)))
        await start(db, key)
    for key in ("j", "j", "k"):
        await start(db, key)
    asked = await start(db, "k")
    await start(db, "k")
    assert (await only(db, asked))["ahead"] == 1


async def test_smaller_versions_are_named_and_larger_ones_are_not(db: AsyncConnection) -> None:
    gate = GateSpec(kind=GateKind.ORDER, name="k", version="{params.seq}")
    await put(db, make_dag("a", {"t": []}, task_gates=(gate,), params=declare_params({"seq": 0})))
    runs = {
        seq: (await trigger(db, dag="a", params={"seq": seq}, actor=Actor("test"))).run_id for seq in (5, 6, 7, 7, 9)
    }
    detail = await only(db, runs[7])
    assert (detail["ahead"], [each["version"] for each in detail["smaller"]]) == (2, [5, 6])


async def test_a_queue_is_described_by_the_runners_that_take_the_task(db: AsyncConnection) -> None:
    await put(db, make_dag("etl", {"t": []}, task_queue="gpu"))
    await put(db, make_dag("other", {"t": []}))

    async def join(queue: str, *match: str) -> Runner:
        return await Runner.join(db, queues=(queue,), match=match)

    async def gone(runner: Runner, seconds: float) -> None:
        await db.execute("update runner set ended_at = %s where session = %s", [later(seconds), runner.session])

    busy, elsewhere = await join("gpu"), await join("default", "other::*")
    for name in ("etl", "other", "other"):
        await start(db, name)
    await busy.claim(1, ("gpu",))
    await elsewhere.claim(2)
    asked = await start(db, "etl")
    # Those that do not take it are named by their patterns, as long as they take anything of this queue.
    for queue, match in (("gpu", "ml::**"), ("gpu", "etl::*"), ("default", "**")):
        await join(queue, match)
    await drain(
        db, sessions=[(await join("gpu")).session, (await join("gpu", "asked::*")).session], actor=Actor("test")
    )
    last = await join("gpu", "etl::*")
    for runner, seconds in (
        (await join("gpu"), 10),
        (last, 20),
        (await join("default"), 30),
        (await join("gpu", "gone::*"), 40),
    ):
        await gone(runner, seconds)
    await set_clock(db, later(100))
    detail = await only(db, asked)
    assert detail["others"] == ["ml::**"]
    assert (detail["runners"], detail["draining"], detail["slots"], detail["busy"]) == (2, 1, 200, 1)
    assert detail["last"] == {"runner": f"r{last.session}", "until": "2030-01-01T00:00:20+00:00"}
