"""What people write beside runs, put in place of results, and delete: guarded by state and by the run's lock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.sql import SQL

from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags, listings, run_lists, runs
from evertick.db.queries.run_lists import MatchingRuns, PageRequest, RunFilter
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine.runs import LONGEST_NOTE, NewOutput, delete_run, of_run, put_output, trigger_run, write_note
from tests.engine.world import Runner, make_dag, put, start, value
from tests.waiting import eventually

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


async def ended(conn: AsyncConnection, outcome: str = "success") -> int:
    await put(conn, make_dag("etl", {"a": [], "b": ["a"]}))
    run_id = await start(conn, "etl")
    await (await Runner.join(conn)).drain({"b": outcome})
    return run_id


async def test_a_note_is_written_changed_taken_away_and_goes_with_its_run(conn: AsyncConnection) -> None:
    run_id = await ended(conn)
    row = await dags.find(conn, "etl")
    assert row is not None
    for content in ("first", "second", None):
        await write_note(conn, of_run(run_id), content=content, actor=Actor("ann"))
        found = await listings.run_by_number(conn, dag_id=row.dag_id, run_id=run_id)
        assert found is not None and found.note == content
    await write_note(conn, TaskKey(run_id, 0, -1), content="of a task", actor=Actor("ann"))
    (task,) = await listings.tasks_of(conn, run_id=run_id, idxs=[0])
    assert task.note == "of a task"
    told = "select count(*) from audit_log where action = 'note' and actor = 'ann' and run_id = %s"
    assert await value(conn, told, run_id) == 4
    with pytest.raises(UserError, match="at most 1000"):
        await write_note(conn, of_run(run_id), content="x" * (LONGEST_NOTE + 1), actor=Actor("ann"))
    with pytest.raises(NotFound):
        await write_note(conn, of_run(run_id + 1), content="x", actor=Actor("ann"))
    assert await value(conn, "select count(*) from note where run_id = %s", run_id + 1) == 0
    await delete_run(conn, run_id=run_id, actor=Actor("ann"))
    epoch = await value(
        conn, "update shard set epoch = epoch + 1, lease_until = clock() + interval '1 h' returning epoch"
    )
    await conn.execute(
        "select * from delete_pending_cleanup(0::smallint, %s, 'run', array[%s]::bigint[], 1000)", [epoch, run_id]
    )
    assert await value(conn, "select count(*) from note") == 0 == await value(conn, "select count(*) from task")


@pytest.mark.parametrize("outcome", ["success", "failed"])
async def test_only_a_run_that_is_over_is_deleted_and_once(conn: AsyncConnection, outcome: str) -> None:
    await put(conn, make_dag("etl", {"a": []}, max_active_runs=1))
    running, queued = await start(conn, "etl"), await start(conn, "etl")
    for run_id in (running, queued):
        with pytest.raises(Conflict, match="has not ended"):
            await delete_run(conn, run_id=run_id, actor=Actor("ann"))
    await (await Runner.join(conn)).drain({"a": outcome})
    await delete_run(conn, run_id=running, actor=Actor("ann"))
    assert await runs.find(conn, running) is None and await runs.find(conn, queued) is not None
    assert await value(conn, "select array_agg(id) from pending_cleanup where kind = 'run'") == [running]
    with pytest.raises(NotFound):
        await delete_run(conn, run_id=running, actor=Actor("ann"))


async def test_a_dag_has_one_run_for_an_instant_of_ones_own(conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}))
    await put(conn, make_dag("other", {"a": []}))
    etl, other = await dags.find(conn, "etl"), await dags.find(conn, "other")
    assert etl is not None and other is not None

    async def trigger(dag_id: int, **about: object) -> tuple[int, bool]:
        made = await trigger_run(conn, dag_id=dag_id, params={}, actor=Actor("ann"), **about)  # type: ignore[arg-type]
        assert made is not None
        return made.run_id, made.is_new

    first, is_new = await trigger(etl.dag_id, fire_at=NOON)
    assert is_new
    assert await trigger(etl.dag_id, fire_at=NOON) == (first, False)
    assert await trigger(etl.dag_id, fire_at=NOON, key="k") == (first, False)
    assert (await trigger(other.dag_id, fire_at=NOON))[1], "of another DAG"
    keyed, is_new = await trigger(etl.dag_id, key="k")
    assert is_new and await trigger(etl.dag_id, key="k") == (keyed, False)
    # A schedule's own run for the instant counts as well.
    await conn.execute(
        "insert into schedule (dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)"
        " values (%s, 's', 1, '{}', '{}', 'skip', 0, 'test', clock())",
        [etl.dag_id],
    )
    fired = await value(
        conn,
        "insert into run (dag_id, version_id, kind, schedule_id, fire_at, params, triggered_by, created_at)"
        " select %s, %s, 'scheduled', schedule_id, %s, '{}', 'schedule', clock() from schedule where name = 's' returning run_id",
        etl.dag_id,
        etl.version_id,
        NOON.replace(hour=13),
    )
    assert await trigger(etl.dag_id, fire_at=NOON.replace(hour=13)) == (fired, False)
    assert (await trigger(etl.dag_id, fire_at=NOON.replace(hour=14)))[1]


async def test_the_tasks_of_a_triggered_run_get_its_date_or_that_of_its_trigger(conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}))
    row, runner = await dags.find(conn, "etl"), await Runner.join(conn)
    assert row is not None
    for fire_at in (NOON, None):
        await trigger_run(conn, dag_id=row.dag_id, params={}, actor=Actor("ann"), fire_at=fire_at)
        (claim,) = await runner.claim()
        made = await runs.find(conn, claim.run_id)
        assert made is not None and (made.fire_at, claim.fire_at) == (fire_at, fire_at or made.created_at)


async def test_outputs_are_put_beside_what_a_task_returned(conn: AsyncConnection) -> None:
    run_id = await ended(conn, "failed")
    a, b = TaskKey(run_id, 0, -1), TaskKey(run_id, 1, -1)

    async def stored() -> object:
        return await value(conn, "select value from result where run_id = %s and idx = 0", run_id)

    for new, expected in (
        (NewOutput(name=None, value=1, must="new"), 1),
        (NewOutput(name="x", value=2, must="new"), {"$evertick": "outputs", "value": 1, "named": {"x": 2}}),
        (NewOutput(name=None, value=3, must="old"), {"$evertick": "outputs", "value": 3, "named": {"x": 2}}),
        (NewOutput(name="x", must="old", is_removed=True), 3),
        (NewOutput(name=None, must="old", is_removed=True), None),
        (NewOutput(name="y", value=[4], must="new"), {"$evertick": "outputs", "value": None, "named": {"y": [4]}}),
    ):
        await put_output(conn, a, new, actor=Actor("ann"))
        assert await stored() == expected, new
    with pytest.raises(Conflict, match="already"):
        await put_output(conn, a, NewOutput(name="y", value=1, must="new"), actor=Actor("ann"))
    with pytest.raises(NotFound):
        await put_output(conn, a, NewOutput(name=None, value=1, must="old"), actor=Actor("ann"))
    with pytest.raises(Conflict, match="succeeded"):
        await put_output(conn, b, NewOutput(name=None, value=1, must="new"), actor=Actor("ann"))
    assert await value(conn, "select count(*) from result where run_id = %s and idx = 1", run_id) == 0


async def noting(conn: AsyncConnection, run_id: int) -> object:
    return await write_note(conn, of_run(run_id), content="late", actor=Actor("ann"))


async def putting(conn: AsyncConnection, run_id: int) -> object:
    return await put_output(conn, TaskKey(run_id, 0, -1), NewOutput(name=None, value=1, must="new"), actor=Actor("ann"))


async def deleting(conn: AsyncConnection, run_id: int) -> object:
    return await delete_run(conn, run_id=run_id, actor=Actor("ann"))


@pytest.mark.parametrize("verb", [noting, putting, deleting])
async def test_whoever_holds_the_run_is_waited_for(
    database: str, conn: AsyncConnection, verb: Callable[[AsyncConnection, int], Awaitable[object]]
) -> None:
    """While it is being deleted nothing is written that would be left behind."""
    run_id = await ended(conn)
    async with await connect(database, purpose=Purpose.SCHEDULER) as actor:
        async with conn.transaction():
            await conn.execute("select from run_status where run_id = %s for update", [run_id])
            doing = asyncio.ensure_future(verb(actor, run_id))
            query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
            await eventually(lambda: value(conn, query, actor.info.backend_pid))
            await conn.execute("delete from run_status where run_id = %s", [run_id])
        with pytest.raises((NotFound, Conflict)):
            await doing
    assert await value(conn, "select count(*) from note") == 0
    assert await value(conn, "select count(*) from pending_cleanup") == 0


@pytest.mark.requirement("H4")
async def test_a_list_by_number_text_or_rare_state_reads_an_index_and_ends_early(
    database: str, conn: AsyncConnection
) -> None:
    """Whatever the number of runs: no sort but of the page, no whole table."""
    await put(conn, make_dag("etl", {"a": []}))
    row = await dags.find(conn, "etl")
    assert row is not None
    await conn.execute(
        "insert into run (dag_id, version_id, kind, params, triggered_by, created_at)"
        " select %s, %s, 'manual', '{}', 'test', clock() from generate_series(1, 3000)",
        [row.dag_id, row.version_id],
    )
    await conn.execute(
        "insert into run_status (run_id, dag_id, version_id, state, open_tasks, finished_at)"
        " select run_id, dag_id, version_id, 'success', 0, clock() from run"
    )
    await conn.execute("analyze run")
    await conn.execute("analyze run_status")
    async with await connect(database, purpose=Purpose.API_READ) as reader:
        for order in ([], [("run_id", True)]):
            wanted = RunFilter(dag_id=row.dag_id)
            page, total = await run_lists.list_runs(reader, wanted, PageRequest(limit=3, order=order))
            numbers = [each.run_id for each in page]
            assert len(page) == 3 and total == 3000 and numbers == sorted(numbers, reverse=bool(order))
            _, counted = await run_lists.list_runs(reader, wanted, PageRequest(limit=1, order=order, is_counted=False))
            assert counted == 0, "who does not ask for a total does not pay for it"
        for wanted, order, index in (
            (RunFilter(), [("run_id", True)], "run_pkey"),
            (RunFilter(dag_id=row.dag_id), [("run_id", True)], "run_"),
            (RunFilter(dag_id=row.dag_id), [("text_id", True)], "run_of_display_id"),
            (RunFilter(dag_id=row.dag_id), [("text_id", False)], "run_of_display_id"),
            (RunFilter(dag_id=row.dag_id, states=["failed", "canceled"]), [], "run_unwell"),
            (RunFilter(dag_id=row.dag_id, states=["running"]), [], "run_active"),
        ):
            statement, params = run_lists.question_of_runs(
                wanted, PageRequest(limit=3, order=order, is_counted=False), MatchingRuns([row.dag_id])
            )
            explained = await reader.execute(SQL("explain (format json) ") + statement, params, prepare=False)
            ((plan,),) = await explained.fetchall()
            nodes = list(_nodes_of(plan[0]["Plan"]))
            assert any(str(node.get("Index Name")).startswith(index) for node in nodes), plan
            assert all(node["Plan Rows"] <= 3 for node in nodes if node["Node Type"] == "Sort"), plan
            assert {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}.isdisjoint(
                {"run", "run_status"}
            ), plan


def _nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """But for the total: that is counted so far and no further, from wherever it is cheapest."""
    if plan["Node Type"] == "Aggregate":
        return
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes_of(child)
