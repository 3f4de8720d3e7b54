"""Generated DAGs through the real engine against a model of a few lines: the final state of every task is the same."""

from __future__ import annotations

import random

import pytest
from psycopg import AsyncConnection

from evertick.domain.dags.trigger_rules import RuleDecision, UpstreamCounts, decide
from evertick.domain.states import TriggerRule
from tests.engine.world import Runner, make_dag, put, run_state, start, states

ENDED = {RuleDecision.SKIP: "skipped", RuleDecision.UPSTREAM_FAILED: "upstream_failed"}


def model(
    shape: dict[str, list[str]], rules: dict[str, TriggerRule], outcomes: dict[str, str], order: list[str]
) -> dict[str, str]:
    """Each task ends on its own, in the order given; after each end whatever can be decided is."""
    final: dict[str, str] = {}
    started: set[str] = set()

    def look() -> bool:
        for task, upstream in shape.items():
            if task in final or task in started:
                continue
            ended = [final[up] for up in upstream if up in final]
            counts = UpstreamCounts(
                total=len(upstream), **{k: ended.count(k) for k in ("success", "failed", "upstream_failed", "skipped")}
            )
            decision = decide(rules[task], counts)
            if decision is RuleDecision.RUN:
                started.add(task)
            elif decision is not RuleDecision.WAIT:
                final[task] = ENDED[decision]
                return True
        return False

    while len(final) < len(shape):
        while look():
            pass
        for task in order:
            if task in started and task not in final:
                final[task] = outcomes[task]
                break
    return final


@pytest.mark.parametrize("seed", range(6))
async def test_a_generated_dag_ends_as_the_model_says(conn: AsyncConnection, seed: int) -> None:
    dice = random.Random(seed)
    runner = await Runner.join(conn)
    for number in range(30):
        names = [f"t{i}" for i in range(dice.randint(2, 12))]
        shape = {name: dice.sample(names[:i], min(i, dice.randint(0, 4))) for i, name in enumerate(names)}
        rules = {name: dice.choice(list(TriggerRule)) for name in names}
        outcomes = {name: dice.choices(["success", "failed", "skipped"], [5, 2, 2])[0] for name in names}
        name = f"dag{number}"
        await put(conn, make_dag(name, shape, per_task={n: {"trigger_rule": rules[n]} for n in names}))
        run = await start(conn, name)
        order: list[str] = []
        claims = await runner.claim(100)
        while claims:
            # One ends at a time, in an order of our choosing, as the model has it.
            claim = dice.choice(claims)
            order.append(names[claim.idx])
            claims.remove(claim)
            more, refused = await runner.step([(claim, outcomes[names[claim.idx]], {})], free=100)
            assert refused == []
            claims += more
        found = await states(conn, run)
        assert found == model(shape, rules, outcomes, order), (seed, number, shape, rules, outcomes)
        leaves = [n for n in names if all(n not in ups for ups in shape.values())]
        expected = "failed" if any(found[leaf] in ("failed", "upstream_failed") for leaf in leaves) else "success"
        assert await run_state(conn, run) == expected


@pytest.mark.parametrize("first_to_end", ["a", "b"])
async def test_one_success_starts_as_soon_as_one_parent_succeeds(conn: AsyncConnection, first_to_end: str) -> None:
    rule = {"c": {"trigger_rule": TriggerRule.ONE_SUCCESS}}
    await put(conn, make_dag("early", {"a": [], "b": [], "c": ["a", "b"]}, per_task=rule))
    run = await start(conn, "early")
    runner = await Runner.join(conn)
    claims = {"ab"[claim.idx]: claim for claim in await runner.claim(2)}
    await runner.finish(claims.pop(first_to_end))
    assert (await states(conn, run))["c"] == "available"
    ((_, claim),) = claims.items()
    await runner.finish(claim, "failed")
    assert (await states(conn, run))["c"] == "available"
