"""A group of tasks that fails runs again as a whole; what comes after it hears of none of it before all of it has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.spec import BranchChoice, DagSpec, GroupSpec
from evertick.domain.dags.validation import validate
from evertick.domain.errors import InvalidDag
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.maintenance import time_out_run
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.reasons import explain
from tests.engine.world import T0, Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

SHAPE = {"before": [], "g.a": ["before"], "g.b": ["before"], "g.c": ["g.a"], "after": ["g.b", "g.c"]}


def grouped(shape: dict[str, list[str]], *, retries: int = 1, **options: object) -> DagSpec:
    """Tasks named `g.x` are in group g, which has retries."""
    given: dict[str, dict[str, object]] = options.pop("per_task", {})  # type: ignore[assignment]
    per_task = {task: {"group": task.split(".")[0], **given.get(task, {})} for task in shape if "." in task}
    names = sorted({task.split(".")[0] for task in per_task})
    groups = tuple(GroupSpec(name=name, retries=retries) for name in names)
    return make_dag("d", shape, per_task={**given, **per_task}, groups=groups, **options)


@pytest.fixture(autouse=True)
async def watched(conn: AsyncConnection) -> object:
    """Illegal moves raise at once; after each test nothing may be violated."""
    await invariants.install(conn)
    yield
    assert await invariants.violations(conn) == []


async def test_all_of_it_runs_again_and_nothing_else(conn: AsyncConnection) -> None:
    await put(conn, grouped(SHAPE))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    (before,) = await runner.claim()
    (a, b), _ = await runner.step([(before, "success", {})], free=10)
    (c,), _ = await runner.step([(a, "success", {"result": 1}), (b, "failed", {"reason": "boom"})], free=10)
    # Not before all of it has ended: c still runs, and nobody outside has heard of anything.
    assert await states(conn, run) == {
        "before": "success",
        "g.a": "success",
        "g.b": "failed",
        "g.c": "running",
        "after": "waiting",
    }
    assert [each.detail["task"] for each in (await explain(conn, run_id=run, task="after")).reasons] == ["g.c"]
    again, _ = await runner.step([(c, "success", {})], free=10)
    assert [(each.idx, each.epoch, each.attempt) for each in again] == [(1, 2, 1), (2, 2, 1)]
    assert await value(conn, "select count(*) from result where idx = 1") == 0
    assert await value(conn, "select detail from audit_log where action = 'retry'") == {
        "group": "g",
        "retried": 1,
        "failed": ["g.b"],
    }
    assert await value(conn, "select count(*) from attempt where outcome in ('success', 'failed')") == 3
    await runner.step([(each, "success", {}) for each in again])
    assert await runner.drain() == ["g.c", "after"]
    assert await run_state(conn, run) == "success"


async def test_after_its_last_try_it_has_failed_and_a_clear_counts_anew(conn: AsyncConnection) -> None:
    await put(conn, grouped(SHAPE, retries=2))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    assert await runner.drain({"g.b": "failed"}) == ["before", *["g.a", "g.b", "g.c"] * 3]
    assert await states(conn, run) == {
        "before": "success",
        "g.a": "success",
        "g.b": "failed",
        "g.c": "success",
        "after": "upstream_failed",
    }
    assert await run_state(conn, run) == "failed"
    chosen = await select_tasks(conn, run_id=run, names=["g.b"], with_downstream=True)
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"))
    assert await runner.drain({"g.b": "failed"}) == ["g.b", *["g.a", "g.b", "g.c"] * 2]
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"))
    assert await runner.drain() == ["g.b", "after"]
    assert await run_state(conn, run) == "success"


async def test_a_tasks_own_retries_come_first(conn: AsyncConnection) -> None:
    once = {"g.b": {"retry": RetryPolicy(retries=1, delay_seconds=0)}}
    await put(conn, grouped({"g.b": []}, per_task=once))
    run = await start(conn, "d")
    assert await (await Runner.join(conn)).drain({"g.b": "failed"}) == ["g.b"] * 4
    assert await run_state(conn, run) == "failed"


async def test_what_it_survives_or_never_began_is_not_tried_again(conn: AsyncConnection) -> None:
    handled = {"g.handler": {"trigger_rule": TriggerRule.ONE_FAILED}}
    await put(conn, grouped({"g.a": [], "g.handler": ["g.a"], "after": ["g.a", "g.handler"]}, per_task=handled))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    assert await runner.drain({"g.a": "failed"}) == ["g.a", "g.handler"]
    assert (await states(conn, run))["after"] == "upstream_failed"
    await put(conn, grouped({"before": [], "g.a": ["before"]}))
    run = await start(conn, "d")
    assert await runner.drain({"before": "failed"}) == ["before"]
    assert await states(conn, run) == {"before": "failed", "g.a": "upstream_failed"}


async def test_mapped_tasks_expand_anew_and_teardowns_run_each_time(conn: AsyncConnection) -> None:
    shape = {"g.list": [], "g.many": ["g.list"], "g.down": ["g.list", "g.many"], "after": ["g.many"]}
    per_task: dict[str, dict[str, object]] = {
        "g.list": {"is_setup": True},
        "g.many": {"mapping": Mapping(lists=(MappedList(argument="x", task="g.list"),))},
        "g.down": {"is_teardown": True, "trigger_rule": TriggerRule.ALL_DONE_SETUP_SUCCESS},
    }
    await put(conn, grouped(shape, per_task=per_task))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    (listed,) = await runner.claim()
    many, _ = await runner.step([(listed, "success", {"result": [1, 2, 3]})], free=10)
    (down,), _ = await runner.step([(each, "failed", {}) for each in many], free=10)
    (listed,), _ = await runner.step([(down, "success", {})], free=10)
    many, _ = await runner.step([(listed, "success", {"result": [4, 5]})], free=10)
    assert [(each.map_index, each.inputs) for each in many] == [(0, '{"": [4]}'), (1, '{"": [5]}')]
    await runner.step([(each, "success", {}) for each in many])
    assert sorted(await runner.drain()) == ["after", "g.down"]
    assert await run_state(conn, run) == "success"


async def test_what_a_branch_outside_did_not_choose_stays_skipped(conn: AsyncConnection) -> None:
    chooses = {"choose": {"choice": BranchChoice.BRANCH}}
    await put(conn, grouped({"choose": [], "g.a": ["choose"], "g.b": ["choose"]}, per_task=chooses))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    (choose,) = await runner.claim()
    (a,), _ = await runner.step([(choose, "success", {"result": ["g.a"], "skip": [2]})], free=10)
    (a,), _ = await runner.step([(a, "failed", {})], free=10)
    assert await states(conn, run) == {"choose": "success", "g.a": "running", "g.b": "skipped"}
    await runner.finish(a)
    assert await run_state(conn, run) == "success"


async def test_a_branch_and_the_end_of_a_group_in_one_report(conn: AsyncConnection) -> None:
    chooses = {"choose": {"choice": BranchChoice.BRANCH}}
    shape = {"choose": [], "g.a": [], "x": ["choose"], "y": ["choose"], "after": ["g.a", "x"]}
    await put(conn, grouped(shape, per_task=chooses))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    choose, a = sorted(await runner.claim(), key=lambda each: each.idx)
    ends = [(choose, "success", {"result": ["y"], "skip": [2]}), (a, "failed", {})]
    more, _ = await runner.step(ends, free=10)
    assert await invariants.violations(conn) == []
    await runner.step([(each, "success", {}) for each in more])
    assert await run_state(conn, run) == "success"


async def test_who_is_canceled_or_took_too_long_does_not_begin_again(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await put(conn, grouped({"g.a": [], "g.b": []}, run_timeout_seconds=10))
    runner = await Runner.join(conn)
    epoch = await lead(conn)
    for is_late in (False, True):
        run = await start(conn, "d")
        a, b = await runner.claim()
        await runner.finish(a, "failed")
        if is_late:
            await set_clock(conn, later(11))
            assert await time_out_run(conn, shard=0, epoch=epoch, run_id=run) == 1
        else:
            await cancel(conn, run_id=run, actor=Actor("ann"))
        await runner.finish(b)
        assert await runner.claim() == []
        assert await run_state(conn, run) == ("failed" if is_late else "canceled")


async def test_a_mark_can_end_it_too(conn: AsyncConnection) -> None:
    await put(conn, grouped({"g.a": [], "g.b": [], "after": ["g.a"]}))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    a, b = await runner.claim()
    await runner.finish(a, "failed")
    await mark(conn, TaskKey(run, 0, -1), state="success", actor=Actor("ann"))
    assert (await states(conn, run))["after"] == "waiting"
    await runner.finish(b)
    assert await runner.drain() == ["after"]
    assert await run_state(conn, run) == "success"


async def test_the_run_begins_again_with_all_tries_of_its_groups(conn: AsyncConnection) -> None:
    await put(conn, replace(grouped({"g.a": []}), retries=1))
    run = await start(conn, "d")
    assert await (await Runner.join(conn)).drain({"g.a": "failed"}) == ["g.a"] * 4
    assert await run_state(conn, run) == "failed"


async def test_two_groups_one_after_the_other(conn: AsyncConnection) -> None:
    await put(conn, grouped({"g.a": [], "g.b": ["g.a"], "h.a": ["g.b"], "h.b": ["g.a", "h.a"], "end": ["h.b"]}))
    run = await start(conn, "d")
    ran = await (await Runner.join(conn)).drain({"h.b": "failed"})
    assert ran == ["g.a", "g.b", "h.a", "h.b", "h.a", "h.b"]
    assert (await states(conn, run))["end"] == "upstream_failed"


async def test_the_size_of_another_group_does_not_end_it(conn: AsyncConnection) -> None:
    await put(conn, grouped({"f.x": [], "g.a": [], "g.b": [], "after": ["g.a", "g.b"]}))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    x, a, b = await runner.claim(10)
    # One end is all of f, and half of g.
    await runner.step([(x, "success", {}), (a, "failed", {})])
    assert await states(conn, run) == {"f.x": "success", "g.a": "failed", "g.b": "running", "after": "waiting"}
    again, _ = await runner.step([(b, "success", {})], free=10)
    assert [each.idx for each in again] == [a.idx, b.idx]


async def test_reconcile_counts_a_group_anew(conn: AsyncConnection) -> None:
    await put(conn, grouped({"g.a": [], "g.b": [], "after": ["g.a"]}))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    a, b = await runner.claim()
    await runner.finish(a)
    await conn.execute("update run_group set ended = 0, more = 3")
    repairs = await value(conn, "select repairs from reconcile_run(%s, null)", run)
    assert repairs == ["group_counter_drift"]
    await runner.finish(b)
    assert await runner.drain() == ["after"]


@pytest.mark.parametrize(
    ("shape", "per_task", "groups", "said"),
    [
        ({"a": []}, {}, [("g", 1)], "group 'g' has retries and no tasks"),
        ({"g.a": []}, {"g.a": {"group": "g"}}, [("g", 101)], "retries is 101; a group can be retried 1 to 100 times"),
        ({"g.h.a": []}, {"g.h.a": {"group": "g.h"}}, [("g", 1), ("g.h", 1)], "'g.h' has retries and is inside 'g'"),
        (
            {"g.a": [], "x": ["g.a"], "g.b": ["x"]},
            {"g.a": {"group": "g"}, "g.b": {"group": "g"}},
            [("g", 1)],
            "'x', outside it, runs between two of its tasks",
        ),
        (
            {"g.a": [], "h.a": ["g.a"], "h.b": [], "g.b": ["h.b"]},
            {"g.a": {"group": "g"}, "g.b": {"group": "g"}, "h.a": {"group": "h"}, "h.b": {"group": "h"}},
            [("g", 1), ("h", 1)],
            "'h.a', outside it, runs between two of its tasks",
        ),
        (
            {"g.a": [], "x": ["g.a"]},
            {"g.a": {"group": "g", "choice": BranchChoice.BRANCH}},
            [("g", 1)],
            r"'g.a' can skip tasks outside it \(x\)",
        ),
    ],
)
def test_a_group_that_could_not_run_again_is_refused(
    shape: dict[str, list[str]], per_task: dict[str, dict[str, object]], groups: list[tuple[str, int]], said: str
) -> None:
    given = tuple(GroupSpec(name=name, retries=retries) for name, retries in groups)
    with pytest.raises(InvalidDag, match=said):
        validate(make_dag("d", shape, per_task=per_task, groups=given))
