"""Mapped groups: each task of the group has an instance per element, which follows only the instances of its own index."""

from __future__ import annotations

import json

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import tasks
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.spec import DagSpec, MappedGroup
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.maintenance import reconcile_runs
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark
from tests.engine import invariants
from tests.engine.world import Runner, lead, make_dag, put, run_state, start, value

FROM_SOURCE = Mapping(lists=(MappedList(argument="x", task="source"),))
THREE = Mapping(lists=(MappedList(argument="x", length=3),))
SHAPE = {"source": [], "g.a": ["source"], "g.b": ["g.a"], "g.c": ["g.b"], "after": ["g.c"]}


def grouped(mapping: Mapping = FROM_SOURCE, shape: dict[str, list[str]] = SHAPE, **per_task: object) -> DagSpec:
    """source >> [a >> b >> c] (mapped) >> after, which takes the results of c."""
    options: dict[str, dict[str, object]] = {name: {"group": "g"} for name in shape if name.startswith("g.")}
    options["g.b"] |= {"inputs": ("g.a", "source")}
    if "after" in shape:
        options["after"] = {"inputs": ("g.c",)}
    for name, given in per_task.items():
        options.setdefault(name.replace("__", "."), {}).update(given)  # type: ignore[call-overload]
    groups = (MappedGroup(name="g", mapping=mapping),)
    return make_dag("grouped", shape, per_task=options, mapped_groups=groups)


async def begin(conn: AsyncConnection, dag: DagSpec, result: object = None) -> tuple[int, Runner, list[ExchangeRow]]:
    """A run whose source has returned this; what can be claimed then."""
    await invariants.install(conn)
    await put(conn, dag)
    run = await start(conn, dag.name)
    runner = await Runner.join(conn)
    claims = await runner.claim()
    if result is None:
        return run, runner, claims
    (source,) = claims
    claims, _ = await runner.step([(source, "success", {"result": result})], free=20_000)
    return run, runner, claims


async def shown(conn: AsyncConnection, run: int) -> dict[str, str]:
    """The states of the group, one letter per instance, and of the rest."""
    assert await invariants.violations(conn) == []
    found: dict[str, list[str]] = {}
    for row in await tasks.list_of_run(conn, run_id=run, limit=100_000):
        found.setdefault(row.task, []).append(row.state)
    return {name: " ".join(states) for name, states in found.items()}


def called(claims: list[ExchangeRow], names: list[str]) -> set[str]:
    return {f"{names[claim.idx]}{claim.map_index}" for claim in claims}


NAMES = ["source", "a", "b", "c", "after"]


async def test_each_instance_follows_its_own_index_and_the_next_task_gets_all_results(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, grouped(), ["p", "q", "r"])
    assert called(claims, NAMES) == {"a0", "a1", "a2"}
    assert [json.loads(claim.inputs or "") for claim in claims] == [{"": ["p"]}, {"": ["q"]}, {"": ["r"]}]
    assert await value(conn, "select open_tasks from run_status where run_id = %s", run) == 10
    # depth first: b[1] and c[1] run before a[0] and a[2] have ended
    ((b1,), _) = await runner.step([(claims[1], "success", {"result": "A1"})], free=50)
    assert json.loads(b1.inputs or "") == {"": ["q"], "g.a": "A1", "source": ["p", "q", "r"]}
    ((c1,), _) = await runner.step([(b1, "success", {})], free=50)
    assert await runner.finish(c1, result="C1") == []
    assert await shown(conn, run) == {
        "source": "success",
        "g.a": "running success running",
        "g.b": "waiting success waiting",
        "g.c": "waiting success waiting",
        "after": "waiting",
    }
    more, _ = await runner.step([(claims[0], "success", {}), (claims[2], "success", {})], free=50)
    more, _ = await runner.step([(each, "success", {}) for each in more], free=50)
    assert called(more, NAMES) == {"c0", "c2"}
    ((after,), _) = await runner.step([(each, "success", {"result": f"C{each.map_index}"}) for each in more], free=50)
    assert json.loads(after.inputs or "") == {"g.c": ["C0", "C1", "C2"]}
    await runner.finish(after)
    assert await run_state(conn, run) == "success"
    assert await shown(conn, run) | {} == {"source": "success", "after": "success"} | dict.fromkeys(
        ("g.a", "g.b", "g.c"), "success success success"
    )


async def test_failures_and_skips_stay_in_their_index(conn: AsyncConnection) -> None:
    dag = grouped(g__c={"trigger_rule": TriggerRule.NONE_FAILED}, after={"trigger_rule": TriggerRule.ALL_DONE})
    run, runner, claims = await begin(conn, dag, [1, 2, 3])
    first: list[tuple[ExchangeRow, str, dict[str, object]]] = [
        (claims[0], "failed", {}),
        (claims[1], "skipped", {}),
        (claims[2], "success", {}),
    ]
    more, _ = await runner.step(first, free=50)
    assert called(more, NAMES) == {"b2", "c1"}
    assert await shown(conn, run) == {
        "source": "success",
        "g.a": "failed skipped success",
        "g.b": "upstream_failed skipped running",
        "g.c": "upstream_failed running waiting",
        "after": "waiting",
    }
    # a mark of one instance evaluates what it had blocked, of its index
    assert await mark(conn, TaskKey(run, 1, 0), state="success", actor=Actor("t")) == "marked"
    (b0,) = await runner.claim()
    assert (b0.idx, b0.map_index) == (2, 0)
    rest: list[tuple[ExchangeRow, str, dict[str, object]]] = [(each, "success", {}) for each in (*more, b0)]
    more, _ = await runner.step(rest, free=50)
    assert called(more, NAMES) == {"c0", "c2"}
    ((after,), _) = await runner.step([(each, "success", {}) for each in more], free=50)
    await runner.finish(after)
    assert await run_state(conn, run) == "success"


@pytest.mark.parametrize(("result", "state"), [([], "skipped"), ("text", "failed")])
async def test_a_group_without_a_list_ends_as_a_whole_and_starts_again_as_one(
    conn: AsyncConnection, result: object, state: str
) -> None:
    run, runner, _ = await begin(conn, grouped(), result)
    after = "skipped" if state == "skipped" else "upstream_failed"
    assert await shown(conn, run) == {
        "source": "success",
        **dict.fromkeys(("g.a", "g.b", "g.c"), state),
        "after": after,
    }
    rows = await tasks.list_of_run(conn, run_id=run)
    done = await clear(
        conn, run_id=run, chosen=[row for row in rows if row.task in ("source", "g.c")], actor=Actor("t")
    )
    assert done.reopened == 2
    (source,) = await runner.claim()
    claims, _ = await runner.step([(source, "success", {"result": [1, 2]})], free=50)
    assert called(claims, NAMES) == {"a0", "a1"}
    assert await shown(conn, run) == {
        "source": "success",
        "g.a": "running running",
        "g.b": "waiting waiting",
        "g.c": "waiting waiting",
        "after": after,
    }


async def test_a_failed_list_ends_the_group_upstream_failed(conn: AsyncConnection) -> None:
    run, runner, (source,) = await begin(conn, grouped(g__c={"trigger_rule": TriggerRule.ALL_DONE}))
    await runner.finish(source, kind="failed")
    assert set((await shown(conn, run)).values()) == {"failed", "upstream_failed"}
    assert await run_state(conn, run) == "failed"


async def test_tasks_outside_are_counted_by_each_instance_also_if_they_end_later(conn: AsyncConnection) -> None:
    shape = {**SHAPE, "x": [], "g.b": ["g.a", "x"]}
    shape = {name: shape[name] for name in ("source", "x", "g.a", "g.b", "g.c", "after")}
    run, runner, claims = await begin(conn, grouped(THREE, shape | {"g.a": []}))
    names = ["source", "x", "a", "b", "c", "after"]
    assert called(claims, names) == {"source-1", "x-1", "a0", "a1", "a2"}
    by_name = {f"{names[claim.idx]}{claim.map_index}": claim for claim in claims}
    assert await runner.step([(by_name["a1"], "success", {}), (by_name["source-1"], "success", {})], free=50) == (
        [],
        [],
    )
    assert (await shown(conn, run))["g.b"] == "waiting waiting waiting"
    more, _ = await runner.step([(by_name["x-1"], "success", {}), (by_name["a0"], "success", {})], free=50)
    assert called(more, names) == {"b0", "b1"}
    assert (await shown(conn, run))["g.b"] == "running running waiting"
    found = await reconcile_runs(conn, shard=0, epoch=await lead(conn), limit=100)
    assert (found.repaired, found.refused) == ([], 0)


async def test_a_branch_skips_its_own_index_or_all_of_another_group(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, grouped(), [1, 2])
    more, _ = await runner.step([(claims[0], "success", {"skip": [2]}), (claims[1], "success", {})], free=50)
    assert called(more, NAMES) == {"b1"}
    assert (await shown(conn, run))["g.b"] == "skipped running"

    # over a list in the code the group has its instances at once; they wait for the branch
    await put(conn, grouped(THREE))
    run = await start(conn, "grouped")
    (branch,) = await runner.claim()
    assert (await shown(conn, run))["g.a"] == "waiting waiting waiting"
    assert await runner.finish(branch, skip=[1]) == []
    assert (await shown(conn, run))["g.c"] == "skipped skipped skipped"
    assert await run_state(conn, run) == "success"

    # a group whose list does not exist yet is skipped as a whole
    shape = {"source": [], "branch": [], "g.a": ["source", "branch"], "g.b": ["g.a"], "g.c": ["g.b"], "after": ["g.c"]}
    await put(conn, grouped(shape=shape))
    run = await start(conn, "grouped")
    source, branch = await runner.claim()
    assert await runner.finish(branch, skip=[2]) == []
    assert await shown(conn, run) == {"source": "running", "branch": "success"} | dict.fromkeys(
        ("g.a", "g.b", "g.c", "after"), "skipped"
    )
    await runner.finish(source, result=[1])
    assert await run_state(conn, run) == "success"


async def test_a_cleared_source_stops_the_group_and_expands_it_again(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, grouped(), [1, 2])
    ((b0,), _) = await runner.step([(claims[0], "success", {})], free=50)
    rows = await tasks.list_of_run(conn, run_id=run)
    done = await clear(conn, run_id=run, chosen=rows, actor=Actor("t"))
    assert done.asked == 2
    assert await shown(conn, run) | {"source": ""} == {
        "source": "", "g.a": "running", "g.b": "running", "g.c": "waiting", "after": "waiting",
    }  # fmt: skip
    (source,) = await runner.claim()
    # its end comes before that of the instances: they hold the group
    assert await runner.step([(source, "success", {"result": [1, 2, 3]})], free=50) == ([], [])
    assert await runner.step([(b0, "failed", {})], free=50) == ([], [])
    assert await invariants.violations(conn) == []
    more, _ = await runner.step([(claims[1], "failed", {})], free=50)
    assert called(more, NAMES) == {"a0", "a1", "a2"}
    assert {claim.map_index: claim.epoch for claim in more} == {0: 2, 1: 2, 2: 2}
    await runner.step([(each, "success", {}) for each in more])
    await runner.drain()
    assert await run_state(conn, run) == "success"
    # one instance with what follows it
    chosen = [
        row for row in await tasks.list_of_run(conn, run_id=run) if row.task != "source" and row.map_index in (1, -1)
    ]
    done = await clear(conn, run_id=run, chosen=chosen, actor=Actor("t"))
    assert (done.reopened, done.asked) == (4, 0)
    (a1,) = await runner.claim()
    assert (a1.idx, a1.map_index, json.loads(a1.inputs or "")) == (1, 1, {"": [2]})
    assert (await shown(conn, run))["g.b"] == "success waiting success"
    assert await runner.finish(a1) == []
    await runner.drain()
    assert await run_state(conn, run) == "success"


async def test_a_canceled_run_cancels_instances_and_a_clear_brings_the_group_back(conn: AsyncConnection) -> None:
    run, runner, claims = await begin(conn, grouped(g__a={"retry": RetryPolicy(retries=1)}), [1, 2])
    await runner.finish(claims[0], kind="success")
    assert await cancel(conn, run_id=run, actor=Actor("t")) == 1
    await runner.finish(claims[1], kind="failed")
    assert await shown(conn, run) == {
        "source": "success",
        "g.a": "success canceled",
        "g.b": "canceled canceled",
        "g.c": "canceled canceled",
        "after": "canceled",
    }
    assert await run_state(conn, run) == "canceled"
    rows = [row for row in await tasks.list_of_run(conn, run_id=run) if row.state == "canceled"]
    await clear(conn, run_id=run, chosen=rows, actor=Actor("t"))
    await runner.drain()
    assert await run_state(conn, run) == "success"
    assert await invariants.violations(conn) == []
