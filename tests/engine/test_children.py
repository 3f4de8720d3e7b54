"""A task that starts another DAG: one run for each time that it is ready, no slot while it waits, and the end is passed on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.db.queries import waits as waits_queries
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.params import JsonValue, Param, declare_params
from evertick.domain.dags.spec import ChildSpec, DagSpec, TaskKind
from evertick.domain.explain import describe
from evertick.engine.maintenance import reconcile_runs
from evertick.engine.runs import cancel, trigger_run
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.waits import MOST_ABOVE, Woken, start_child_run, wake
from tests.engine import invariants
from tests.engine.reasons import explain
from tests.engine.world import Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value


def parent(*, name: str = "parent", dag: str = "child", waits: bool = True, **fields: object) -> DagSpec:
    """before >> call >> after, where call starts the other DAG."""
    child = ChildSpec(dag=dag, params=fields.pop("params", {}), waits=waits)  # type: ignore[arg-type]
    options = {"call": {"kind": TaskKind.TRIGGER, "child": child, **fields}, "after": {"inputs": ("call",)}}
    return make_dag(name, {"before": [], "call": ["before"], "after": ["call"]}, per_task=options)


async def world(conn: AsyncConnection, spec: DagSpec, **child: object) -> tuple[int, Runner, int]:
    """The parent's run up to the call; the leader's epoch."""
    await invariants.install(conn)
    await put(conn, make_dag("child", {"work": []}, **child))
    await put(conn, spec)
    epoch = await lead(conn)
    run = await start(conn, "parent")
    runner = await Runner.join(conn)
    (before,) = await runner.claim()
    await runner.finish(before)
    return run, runner, epoch


async def woken(conn: AsyncConnection, epoch: int) -> Woken:
    done = await wake(conn, shard=0, epoch=epoch, batch=100)
    assert await invariants.violations(conn) == []
    return done


async def child_of(conn: AsyncConnection, run: int) -> int:
    found = await value(conn, "select run_id from child_run where parent_run_id = %s", run)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(
    ("outcome", "called", "after", "reason"),
    [("success", "success", "available", None), ("failed", "failed", "upstream_failed", "run 2 of child failed")],
)
async def test_a_task_ends_as_the_run_does_that_it_started(
    conn: AsyncConnection, outcome: str, called: str, after: str, reason: str | None
) -> None:
    run, runner, epoch = await world(conn, parent())
    assert (await states(conn, run))["call"] == "deferred"
    assert await runner.claim() == [], "no runner sees it"
    await woken(conn, epoch)
    child = await child_of(conn, run)
    assert "it waits for run 2 of child, which is running" in describe(
        (await explain(conn, run_id=run, task="call")).reasons[0]
    )
    assert (await woken(conn, epoch)).looked_at == 0, "it is looked at when something happens"
    (work,) = await runner.claim()
    assert work.run_id == child
    await runner.finish(work, outcome)
    assert (await woken(conn, epoch)).looked_at == 1
    found = await states(conn, run)
    assert (found["call"], found["after"]) == (called, after)
    assert await value(conn, "select reason from task where run_id = %s and idx = 1", run) == reason
    if called == "success":
        (last,) = await runner.claim()
        assert last.inputs == f'{{"call": {child}}}'
    assert await value(conn, "select count(*) from deferral") == 0


async def test_without_waiting_it_is_done_when_the_run_is_there(conn: AsyncConnection) -> None:
    run, _, epoch = await world(conn, parent(waits=False))
    await woken(conn, epoch)
    assert (await states(conn, run))["call"] == "success"
    assert await run_state(conn, await child_of(conn, run)) == "running"


async def test_there_is_one_run_however_often_it_is_started(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, parent())
    (due,) = await waits_queries.child_runs_due(conn, shard=0, limit=10)
    row = await value(conn, "select dag_id from dag where name = 'child'")
    assert isinstance(row, int)
    for _ in range(2):
        made = await start_child_run(conn, due, shard=0, epoch=epoch, dag_id=row, params={}, reason=None)
        assert made == await child_of(conn, run)
    assert await value(conn, "select count(*) from run") == 2
    assert [claim.run_id for claim in await runner.claim()] == [made]


async def test_cleared_it_starts_another_run(conn: AsyncConnection) -> None:
    run, runner, epoch = await world(conn, parent())
    await woken(conn, epoch)
    await runner.finish((await runner.claim())[0], "failed")
    await woken(conn, epoch)
    assert await run_state(conn, run) == "failed"
    await clear(
        conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["call", "after"]), actor=Actor("me")
    )
    await woken(conn, epoch)
    await runner.finish((await runner.claim())[0])
    await woken(conn, epoch)
    assert await runner.drain() == ["after"]
    assert await run_state(conn, run) == "success"
    assert await value(conn, "select count(*) from child_run") == 2


@pytest.mark.parametrize(
    ("spec", "child", "reason"),
    [
        (parent(dag="chidl"), {}, "cannot start chidl: There is no DAG 'chidl'. Did you mean 'child'?"),
        (parent(params={"x": 1}), {}, "cannot start child: "),
        (parent(params={"x": "no"}), {"params": declare_params({"x": Param(1)})}, "cannot start child: "),
    ],
)
async def test_what_cannot_be_started_fails_with_its_reason(
    conn: AsyncConnection, spec: DagSpec, child: dict[str, object], reason: str
) -> None:
    run, _, epoch = await world(conn, spec, **child)
    await woken(conn, epoch)
    assert (await states(conn, run))["call"] == "failed"
    assert str(await value(conn, "select reason from task where run_id = %s and idx = 1", run)).startswith(reason)
    assert await run_state(conn, run) == "failed"


GIVEN: dict[str, JsonValue] = {
    "rows": {"task": "before", "path": ["n", 0]},
    "day": {"task": "before", "path": ["day"]},
    "who": {"param": "who"},
}
TAKEN = declare_params({"rows": Param(1), "day": Param("never"), "who": Param("nobody"), "fixed": Param("")})


def passing_on() -> DagSpec:
    spec = parent(inputs=("before",))
    call = replace(spec.tasks[1], child=ChildSpec(dag="child", params={"fixed": "yes"}, given=GIVEN))
    return replace(spec, tasks=(spec.tasks[0], call, spec.tasks[2]), params=declare_params({"who": Param("ann")}))


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"n": [7], "day": {"$evertick": "date", "value": "2030-01-02"}}, None),
        ({"$evertick": "outputs", "value": None, "named": {"n": [7], "day": "2030-01-02"}}, None),
        (None, "param 'day' takes the result of task before, which returned nothing: return a value from it."),
        ({"n": [], "day": ""}, "param 'rows': the result of task before has no 0."),
        (
            {"n": [7], "day": {"$evertick": "bytes", "value": ""}},
            "param 'day': the result of task before is of type bytes, which",
        ),
        (
            {"$evertick": "file", "hash": "x"},
            "param 'day': the result of task before is so large that it was stored in a file",
        ),
        ({"n": ["seven"], "day": ""}, "param 'rows'"),
        (
            {"$evertick": "outputs"},
            "param 'day' takes the result of task before, which returned nothing: return a value from it.",
        ),
        ({"n": [7], "day": {"$evertick": "date"}}, "param 'day': the result of task before is of type date, which"),
        ({"n": [7], "day": {"$evertick": []}}, "param 'day': the result of task before is of type [], which"),
    ],
)
async def test_results_and_parameters_are_passed_on(conn: AsyncConnection, result: object, reason: str | None) -> None:
    await put(conn, make_dag("child", {"work": []}, params=TAKEN))
    await put(conn, passing_on())
    epoch = await lead(conn)
    parent_row = await dags.find(conn, "parent")
    assert parent_row is not None
    made = await trigger_run(conn, dag_id=parent_row.dag_id, params={"who": "bob"}, key=None, actor=Actor("test"))
    assert made is not None
    runner = await Runner.join(conn)
    (before,) = await runner.claim()
    await runner.finish(before, **({} if result is None else {"result": result}))
    await wake(conn, shard=0, epoch=epoch, batch=100)
    if reason is None:
        given = await value(conn, "select params from run where run_id = %s", await child_of(conn, made.run_id))
        assert given == {"rows": 7, "day": "2030-01-02", "who": "bob", "fixed": "yes"}
    else:
        said = await value(conn, "select reason from task where run_id = %s and idx = 1", made.run_id)
        assert str(said).startswith(f"cannot start child: {reason}"), said


async def test_past_its_deadline_it_fails_and_the_other_run_goes_on(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    run, _, epoch = await world(conn, parent(timeout_seconds=60))
    await woken(conn, epoch)
    await set_clock(conn, later(59))
    assert (await woken(conn, epoch)).looked_at == 0
    await set_clock(conn, later(61))
    await woken(conn, epoch)
    assert (await states(conn, run))["call"] == "failed"
    assert (
        await value(conn, "select reason from task where run_id = %s and idx = 1", run)
        == "run 2 of child did not end in time"
    )
    assert await run_state(conn, await child_of(conn, run)) == "running"


async def test_dags_that_start_each_other_come_to_an_end(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    for name, other in (("ping", "pong"), ("pong", "ping")):
        call = {"call": {"kind": TaskKind.TRIGGER, "child": ChildSpec(dag=other)}}
        await put(conn, make_dag(name, {"call": []}, per_task=call))
    epoch = await lead(conn)
    run = await start(conn, "ping")
    for _ in range(3 * MOST_ABOVE):
        await woken(conn, epoch)
    assert await run_state(conn, run) == "failed"
    assert await value(conn, "select count(*) from run") == MOST_ABOVE + 1
    assert await value(conn, "select count(*) from deferral") == 0


@pytest.mark.parametrize("verb", ["cancel", "mark"])
async def test_a_task_that_was_ended_by_hand_leaves_nothing_behind(conn: AsyncConnection, verb: str) -> None:
    run, runner, epoch = await world(conn, parent())
    await woken(conn, epoch)
    if verb == "cancel":
        await cancel(conn, run_id=run, actor=Actor("me"))
    else:
        await mark(conn, TaskKey(run, 1, -1), state="success", actor=Actor("me"))
    await runner.drain()
    await woken(conn, epoch)
    assert (await states(conn, run))["call"] == ("canceled" if verb == "cancel" else "success")
    assert await value(conn, "select count(*) from deferral") == 0
    assert await run_state(conn, await child_of(conn, run)) == "success"


async def test_an_end_that_nobody_told_of_is_found_later(conn: AsyncConnection) -> None:
    await set_clock(conn, later(0))
    run, runner, epoch = await world(conn, parent())
    await woken(conn, epoch)
    await conn.execute("update dag set has_dependents = false")
    await runner.drain()
    assert (await woken(conn, epoch)).looked_at == 0
    await set_clock(conn, later(601))
    await woken(conn, epoch)
    assert (await states(conn, run))["call"] == "success"


async def test_a_deferred_task_that_lost_its_row_is_found_by_reconcile(conn: AsyncConnection) -> None:
    run, _, epoch = await world(conn, parent())
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)).repaired == []
    await conn.execute("delete from deferral")
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)).repaired == ["deferral_missing"]
    await woken(conn, epoch)
    assert await child_of(conn, run)
