"""Branches, short-circuits, setups and teardowns in the engine: what is skipped, what decides the run, what is cleared together."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.domain.access import Actor
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.graph import judge
from evertick.domain.dags.spec import BranchChoice, DagSpec
from evertick.domain.states import TriggerRule
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import Runner, key_of, make_dag, put, run_state, start, states

JOIN = {"trigger_rule": TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS}
TEARDOWN = {"is_teardown": True, "trigger_rule": TriggerRule.ALL_DONE_SETUP_SUCCESS}


def branching(choice: BranchChoice = BranchChoice.BRANCH, **options: dict[str, object]) -> DagSpec:
    """choose >> [a, b, c]; a >> [c, join]; b >> join"""
    shape = {"choose": [], "a": ["choose"], "b": ["choose"], "c": ["choose", "a"], "join": ["a", "b"]}
    return make_dag("branching", shape, per_task={"choose": {"choice": choice}, "join": JOIN, **options})


async def chosen(conn: AsyncConnection, spec: DagSpec, result_json: str | None) -> tuple[int, Runner]:
    """A run whose first task has returned this, told by a runner as a runner does."""
    await invariants.install(conn)
    await put(conn, spec)
    run = await start(conn, spec.name)
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    outcome = Outcome(key=key_of(claim), epoch=claim.epoch, kind=OutcomeKind.SUCCESS, result_json=result_json)
    judged = judge(spec, outcome)
    fields: dict[str, object] = {"no_retry": judged.no_retry, "reason": judged.reason}
    await runner.finish(claim, judged.kind, **fields, **({"skip": judged.skips} if judged.skips else {}))
    assert await invariants.violations(conn) == []
    return run, runner


@pytest.mark.parametrize(
    ("result_json", "expected"),
    [
        ('"a"', {"a": "available", "b": "skipped", "c": "waiting", "join": "waiting"}),
        ('["b", "c"]', {"a": "skipped", "b": "available", "c": "available", "join": "waiting"}),
        ('["a", "b", "c"]', {"a": "available", "b": "available", "c": "waiting", "join": "waiting"}),
        (None, {"a": "skipped", "b": "skipped", "c": "skipped", "join": "skipped"}),
    ],
)
async def test_a_branch_skips_what_it_does_not_name(
    conn: AsyncConnection, result_json: str | None, expected: dict[str, str]
) -> None:
    spec = branching(c={"trigger_rule": TriggerRule.NONE_FAILED}) if result_json == '["b", "c"]' else branching()
    run, _ = await chosen(conn, spec, result_json)
    found = await states(conn, run)
    if result_json == '["b", "c"]':
        # c comes after a as well: that was skipped by the branch, and c's own rule decides.
        assert found["c"] == "available"
    assert {name: found[name] for name in expected} == expected


async def test_the_ways_join_where_the_rule_allows_it_and_the_run_succeeds(conn: AsyncConnection) -> None:
    run, runner = await chosen(conn, branching(), '"b"')
    assert await runner.drain() == ["b", "join"]
    assert await run_state(conn, run) == "success"


@pytest.mark.parametrize(
    ("choice", "result_json", "expected"),
    [
        (BranchChoice.SHORT_CIRCUIT, "true", "waiting"),
        (BranchChoice.SHORT_CIRCUIT, "0", "skipped"),
        (BranchChoice.SHORT_CIRCUIT, None, "skipped"),
        (BranchChoice.SHORT_CIRCUIT_DIRECT, "false", "available"),
    ],
)
async def test_a_short_circuit_skips_everything_or_leaves_it_to_the_rules(
    conn: AsyncConnection, choice: BranchChoice, result_json: str | None, expected: str
) -> None:
    run, _ = await chosen(conn, branching(choice, join={"trigger_rule": TriggerRule.ALL_DONE}), result_json)
    assert (await states(conn, run))["join"] == expected


@pytest.mark.parametrize("result_json", ['"nowhere"', '["a", "join"]', "7"])
async def test_a_choice_that_is_none_fails_with_what_it_could_have_been(
    conn: AsyncConnection, result_json: str
) -> None:
    run, _ = await chosen(conn, branching(), result_json)
    found = await states(conn, run)
    assert (found["choose"], found["a"]) == ("failed", "upstream_failed")
    outcome = Outcome(key=TaskKey(1, 0, -1), epoch=1, kind=OutcomeKind.SUCCESS, result_json=result_json)
    assert "return one of a, b, c, or None" in str(judge(branching(), outcome).reason)


async def test_only_the_owner_of_the_attempt_skips(conn: AsyncConnection) -> None:
    await put(conn, branching())
    run = await start(conn, "branching")
    mine, other = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await mine.claim()
    skip: dict[str, Any] = {"skip": [1, 2]}
    assert await other.finish(claim, **skip) != []
    await mine.finish(claim._replace(epoch=7), **skip)
    assert (await states(conn, run))["a"] == "waiting"
    await mark(conn, key_of(claim), state="success", actor=Actor("me"))
    await mine.finish(claim, **skip)
    assert (await states(conn, run))["a"] == "available", "somebody else decided how it ended"


SHAPE = {"make": [], "work": ["make"], "drop": ["work", "make"]}


def guarded(**drop: object) -> DagSpec:
    return make_dag("guarded", SHAPE, per_task={"make": {"is_setup": True}, "drop": {**TEARDOWN, **drop}})


@pytest.mark.parametrize(
    ("outcomes", "fails_run", "ran", "ended"),
    [
        ({"work": "failed"}, False, ["make", "work", "drop"], "failed"),
        ({"drop": "failed"}, False, ["make", "work", "drop"], "success"),
        ({"drop": "failed"}, True, ["make", "work", "drop"], "failed"),
        ({"make": "failed"}, False, ["make"], "failed"),
        ({"make": "skipped"}, False, ["make"], "success"),
    ],
)
async def test_a_teardown_runs_when_its_setup_succeeded_and_seldom_decides_the_run(
    conn: AsyncConnection, outcomes: dict[str, str], fails_run: bool, ran: list[str], ended: str
) -> None:
    await invariants.install(conn)
    await put(conn, guarded(fails_run=fails_run))
    run = await start(conn, "guarded")
    runner = await Runner.join(conn)
    assert await runner.drain(outcomes) == ran
    assert await run_state(conn, run) == ended
    assert await invariants.violations(conn) == []


async def test_clearing_work_clears_its_setup_and_teardown(conn: AsyncConnection) -> None:
    shape = {**SHAPE, "elsewhere": ["make", "drop"]}
    await put(conn, make_dag("guarded", shape, per_task={"make": {"is_setup": True}, "drop": TEARDOWN}))
    run = await start(conn, "guarded")
    runner = await Runner.join(conn)
    await runner.drain()
    cleared = await select_tasks(conn, run_id=run, names=["work"])
    assert [row.task for row in cleared] == ["make", "work", "drop"]
    assert [row.task for row in await select_tasks(conn, run_id=run, names=["drop"])] == ["drop"]
    assert [row.task for row in await select_tasks(conn, run_id=run, names=["elsewhere"])] == ["elsewhere"]
    await clear(conn, run_id=run, chosen=cleared, actor=Actor("me"))
    assert await runner.drain() == ["make", "work", "drop"]
