"""Dynamic mapping: a task becomes its instances, which are tasks like all others; whoever comes after counts each of them."""

from __future__ import annotations

import json

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runs, tasks
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.mapping import MapHow, MappedList, Mapping
from evertick.domain.dags.spec import DagSpec
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.dags import pause, unpause
from evertick.engine.maintenance import reconcile_runs
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, lead, make_dag, put, run_state, start, value


def over(*lists: MappedList, how: MapHow = MapHow.PRODUCT, most: int = 10_000) -> Mapping:
    return Mapping(lists=lists, how=how, most=most)


RESULT = over(MappedList(argument="x", task="source"))
THREE = over(MappedList(argument="x", length=3))


def mapped_dag(
    mapping: Mapping = RESULT, *, name: str = "mapped", rule: str = "all_success", **options: object
) -> DagSpec:
    """source >> work (mapped) >> gather, which takes what work returned."""
    per_task = {
        "work": {"mapping": mapping, **options},
        "gather": {"inputs": ("work",), "trigger_rule": TriggerRule(rule)},
    }
    return make_dag(name, {"source": [], "work": ["source"], "gather": ["work"]}, per_task=per_task)


async def begin(conn: AsyncConnection, dag: DagSpec, result: object = None) -> tuple[int, Runner, list[ExchangeRow]]:
    """A run of the DAG whose source has returned this; what can be claimed then."""
    await invariants.install(conn)
    await put(conn, dag)
    run = await start(conn, dag.name)
    runner = await Runner.join(conn)
    (source,) = await runner.claim()
    claims, _ = await runner.step([(source, "success", {} if result is None else {"result": result})], free=20_000)
    return run, runner, claims


async def shown(conn: AsyncConnection, run: int) -> dict[str, str]:
    assert await invariants.violations(conn) == []
    rows = await tasks.list_of_run(conn, run_id=run, limit=100_000)
    return {row.task if row.map_index < 0 else f"{row.task}[{row.map_index}]": row.state for row in rows}


def given(claim: ExchangeRow) -> object:
    return json.loads(claim.inputs or "{}").get("")


async def test_a_task_becomes_an_instance_for_each_element_and_the_next_gets_all_results_in_order(
    conn: AsyncConnection,
) -> None:
    run, runner, claims = await begin(conn, mapped_dag(), ["a", {"b": 1}, None])
    assert [(claim.map_index, given(claim)) for claim in claims] == [(0, ["a"]), (1, [{"b": 1}]), (2, [None])]
    assert await shown(conn, run) == {
        "source": "success",
        "work[0]": "running",
        "work[1]": "running",
        "work[2]": "running",
        "gather": "waiting",
    }
    found = await runs.find(conn, run)
    assert found is not None and (found.task_count, found.open_tasks) == (5, 4)
    for claim in (claims[2], claims[0]):
        assert await runner.finish(claim, result=f"r{claim.map_index}") == []
    ((gather,), _) = await runner.step([(claims[1], "success", {"result": "r1"})], free=5)
    assert gather.inputs == '{"work": ["r0", "r1", "r2"]}'
    await runner.finish(gather)
    assert await run_state(conn, run) == "success"
    assert await invariants.violations(conn) == []


@pytest.mark.parametrize(
    ("how", "lists", "expected"),
    [
        (MapHow.PRODUCT, (2, 3), [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]),
        (MapHow.ZIP, (2, 2), [[0, 0], [1, 1]]),
        (MapHow.KWARGS, (3,), [[0], [1], [2]]),
        (MapHow.PRODUCT, (1,), [[0]]),
    ],
)
async def test_lists_in_the_code_are_given_by_place(
    conn: AsyncConnection, how: MapHow, lists: tuple[int, ...], expected: list[list[int]]
) -> None:
    mapping = over(*(MappedList(argument=f"x{n}", length=n) for n in lists), how=how)
    _, _, claims = await begin(conn, mapped_dag(mapping))
    assert [given(claim) for claim in claims] == expected


async def test_a_list_in_the_code_and_a_result_make_every_combination(conn: AsyncConnection) -> None:
    mapping = over(MappedList(argument="x", task="source"), MappedList(argument="y", length=2))
    _, _, claims = await begin(conn, mapped_dag(mapping), ["a", "b"])
    assert [given(claim) for claim in claims] == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]


async def test_a_mapped_task_without_upstream_starts_with_its_run(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await put(conn, make_dag("alone", {"work": []}, per_task={"work": {"mapping": THREE}}))
    run = await start(conn, "alone")
    assert await shown(conn, run) == {"work[0]": "available", "work[1]": "available", "work[2]": "available"}
    runner = await Runner.join(conn)
    assert await runner.drain() == ["work"] * 3
    assert await run_state(conn, run) == "success"


async def test_the_results_of_a_mapped_task_can_be_expanded_over(conn: AsyncConnection) -> None:
    again = over(MappedList(argument="y", task="work"))
    shape = {"source": [], "work": ["source"], "again": ["work"]}
    dag = make_dag("twice", shape, per_task={"work": {"mapping": RESULT}, "again": {"mapping": again}})
    run, runner, claims = await begin(conn, dag, [1, 2, 3])
    kinds = ["success", "success", "success"]
    ends = [
        (claim, kind, {"result": 10 * claim.map_index} if claim.map_index != 1 else {})
        for claim, kind in zip(claims, kinds, strict=True)
    ]
    claims, _ = await runner.step(ends, free=10)
    assert [given(claim) for claim in claims] == [[0], [20]], "what returned nothing leaves no element"
    await runner.step([(claim, "success", {}) for claim in claims])
    assert await run_state(conn, run) == "success"
    assert await invariants.violations(conn) == []


EMPTY = {"source": "success", "work": "skipped", "gather": "skipped"}
REFUSED = {"source": "success", "work": "failed", "gather": "upstream_failed"}


@pytest.mark.parametrize(
    ("mapping", "result", "expected", "reason"),
    [
        (RESULT, [], EMPTY, "nothing to expand over: the list is empty"),
        (RESULT, None, REFUSED, "cannot expand over the result of task source: it is nothing, not a list"),
        (RESULT, {"a": 1}, REFUSED, "it is a dict, not a list"),
        (RESULT, "abc", REFUSED, "it is text, not a list"),
        (
            over(MappedList(argument="x", task="source"), most=2),
            [1, 2, 3],
            REFUSED,
            "expands to 3 instances, and at most 2",
        ),
        (over(MappedList(task="source"), how=MapHow.KWARGS), [{}, 1], REFUSED, "expand_kwargs takes a list of dicts"),
        (
            over(MappedList(argument="x", task="source"), MappedList(argument="y", length=2), how=MapHow.ZIP),
            [1, 2, 3],
            REFUSED,
            "side by side: they have 3, 2 elements",
        ),
    ],
)
async def test_what_cannot_be_expanded_ends_with_its_reason(
    conn: AsyncConnection, mapping: Mapping, result: object, expected: dict[str, str], reason: str
) -> None:
    run, _, claims = await begin(conn, mapped_dag(mapping), result)
    assert claims == []
    assert await shown(conn, run) == expected
    assert reason in str(await value(conn, "select reason from task where idx = 1"))
    assert await run_state(conn, run) == ("success" if expected is EMPTY else "failed")


async def test_a_skipped_source_skips_what_would_expand_over_it(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await put(conn, mapped_dag(trigger_rule=TriggerRule.NONE_FAILED))
    run = await start(conn, "mapped")
    runner = await Runner.join(conn)
    (source,) = await runner.claim()
    await runner.finish(source, "skipped")
    assert await shown(conn, run) == {"source": "skipped", "work": "skipped", "gather": "skipped"}


@pytest.mark.parametrize(
    ("rule", "kinds", "after_each"),
    [
        ("all_success", ["success", "failed", "success"], ["waiting", "upstream_failed", "upstream_failed"]),
        ("all_success", ["success", "skipped", "success"], ["waiting", "skipped", "skipped"]),
        ("one_failed", ["success", "failed", "success"], ["waiting", "available", "available"]),
        ("one_success", ["success", "failed", "failed"], ["available", "available", "available"]),
        ("none_failed_min_one_success", ["skipped", "skipped", "success"], ["waiting", "waiting", "available"]),
        ("all_failed", ["failed", "failed", "failed"], ["waiting", "waiting", "available"]),
        ("all_done", ["failed", "success", "skipped"], ["waiting", "waiting", "available"]),
    ],
)
async def test_trigger_rules_count_each_instance(
    conn: AsyncConnection, rule: str, kinds: list[str], after_each: list[str]
) -> None:
    run, runner, claims = await begin(conn, mapped_dag(rule=rule), [1, 2, 3])
    seen = []
    for claim, kind in zip(claims, kinds, strict=True):
        await runner.finish(claim, kind)
        seen.append((await shown(conn, run))["gather"])
    assert seen == after_each


async def test_an_instance_is_retried_alone(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, mapped_dag(retry=RetryPolicy(retries=1, delay_seconds=0)), [1, 2])
    await runner.finish(claims[0])
    ((again,), _) = await runner.step([(claims[1], "failed", {"reason": "boom"})], free=5)
    assert (again.map_index, again.attempt, given(again)) == (1, 2, [2])
    await runner.finish(again)
    assert (await shown(conn, run))["gather"] == "available"


async def test_one_instance_is_cleared_alone_and_the_others_stay(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, mapped_dag(), [1, 2, 3])
    await runner.step([(claim, "failed" if claim.map_index == 1 else "success", {"result": 1}) for claim in claims])
    assert await run_state(conn, run) == "failed"
    chosen = await select_tasks(conn, run_id=run, only_failed=True)
    assert [(row.task, row.map_index) for row in chosen] == [("work", 1), ("gather", -1)]
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("me"))
    assert await shown(conn, run) == {
        "source": "success",
        "work[0]": "success",
        "work[1]": "available",
        "work[2]": "success",
        "gather": "waiting",
    }
    (again,) = await runner.claim()
    assert (again.map_index, again.epoch, given(again)) == (1, 2, [2])
    await runner.step([(again, "success", {"result": 9})], free=0)
    (gather,) = await runner.claim()
    assert gather.inputs == '{"work": [1, 9, 1]}'


async def test_cleared_as_a_whole_it_looks_at_its_lists_anew(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, mapped_dag(), [1, 2, 3])
    ((gather,), _) = await runner.step([(claim, "success", {"result": 1}) for claim in claims], free=1)
    await runner.finish(gather)
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    assert await shown(conn, run) == {"source": "available", "work": "waiting", "gather": "waiting"}
    (source,) = await runner.claim()
    claims, _ = await runner.step([(source, "success", {"result": ["x", "y"]})], free=10)
    assert [(claim.map_index, claim.epoch, given(claim)) for claim in claims] == [(0, 2, ["x"]), (1, 2, ["y"])], (
        "no epoch twice"
    )
    claims, _ = await runner.step([(claim, "success", {}) for claim in claims], free=10)
    await runner.finish(claims[0])
    assert await run_state(conn, run) == "success"
    assert await invariants.violations(conn) == []


async def test_an_instance_that_runs_is_stopped_before_the_whole_starts_again(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, mapped_dag(), [1, 2, 3])
    first, second, third = claims
    await runner.step([(first, "success", {"result": 1}), (third, "given_back", {})])
    assert (await shown(conn, run))["work[2]"] == "available"
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("me"))
    assert await shown(conn, run) == {"source": "available", "work[1]": "running", "gather": "waiting"}
    (source,) = await runner.claim()
    await runner.finish(source, result=[7])
    assert await runner.claim() == [], "the old one still runs"
    ((fresh,), _) = await runner.step([(second, "killed", {})], free=10)
    assert (fresh.map_index, given(fresh)) == (0, [7])
    assert fresh.epoch > max(first.epoch, second.epoch, third.epoch)
    await runner.finish(fresh, result=1)
    assert (await shown(conn, run))["gather"] == "available"


async def test_a_cancel_ends_all_instances(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, mapped_dag(), [1, 2, 3])
    await runner.finish(claims[0], "given_back")
    await cancel(conn, run_id=run, actor=Actor("me"))
    for claim in claims[1:]:
        await runner.finish(claim, "killed")
    assert set((await shown(conn, run)).values()) == {"success", "canceled"}
    assert await run_state(conn, run) == "canceled"


async def test_instances_pass_gates_and_wait_while_their_dag_is_paused(conn: AsyncConnection) -> None:
    gate = GateSpec(kind=GateKind.TASK, name="", capacity=2)
    run, runner, claims = await begin(conn, mapped_dag(gates=(gate,)), [1, 2, 3])
    assert [claim.map_index for claim in claims] == [0, 1]
    assert (await shown(conn, run))["work[2]"] == "pending"
    await pause(conn, dag="mapped", actor=Actor("me"))
    claims_after, _ = await runner.step([(claims[0], "success", {})], free=5)
    assert claims_after == []
    await unpause(conn, dag="mapped", actor=Actor("me"))
    (third,) = await runner.claim()
    assert third.map_index == 2
    assert await invariants.violations(conn) == []


async def test_a_paused_dag_expands_when_it_goes_on(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await put(conn, mapped_dag())
    run = await start(conn, "mapped")
    runner = await Runner.join(conn)
    (source,) = await runner.claim()
    await pause(conn, dag="mapped", actor=Actor("me"))
    await runner.finish(source, result=[1, 2])
    assert (await shown(conn, run))["work"] == "pending"
    await unpause(conn, dag="mapped", actor=Actor("me"))
    assert (await shown(conn, run))["work[1]"] == "available"


async def test_reconcile_finds_nothing_wrong_with_instances_and_repairs_what_is(conn: AsyncConnection) -> None:
    run, _, _ = await begin(conn, mapped_dag(), [1, 2, 3])
    epoch = await lead(conn)
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)).repaired == []
    await conn.execute("update task set n_extra = 7 where idx = 2")
    await conn.execute("update run_status set open_tasks = 9, extra_tasks = 4")
    await reconcile_runs(conn, shard=0, epoch=epoch, limit=100)
    assert (await shown(conn, run))["gather"] == "waiting"
    assert await value(conn, "select n_extra from task where idx = 2") == 2
    assert await value(conn, "select extra_tasks from run_status") == 2


@pytest.mark.parametrize("has_started", [False, True])
async def test_instances_in_line_are_taken_back_by_a_clear_above_unless_one_has_started(
    conn: AsyncConnection, has_started: bool
) -> None:
    await invariants.install(conn)
    await put(conn, mapped_dag())
    run = await start(conn, "mapped")
    runner = await Runner.join(conn)
    (source,) = await runner.claim()
    await runner.finish(source, result=[1, 2, 3])
    held = await runner.claim(1) if has_started else []
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["source"]), actor=Actor("ann"))
    found = await shown(conn, run)
    if has_started:
        # They stand as they are, as every successor does that has begun.
        assert [found[f"work[{n}]"] for n in range(3)] == ["running", "available", "available"]
        await runner.step([(held[0], "success", {})])
    else:
        assert found == {"source": "available", "work": "waiting", "gather": "waiting"}
        (source,) = await runner.claim()
        await runner.finish(source, result=[4])
        assert [claim.inputs for claim in await runner.claim()] == ['{"": [4]}']
