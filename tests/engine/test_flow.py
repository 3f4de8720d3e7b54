"""From a trigger to a finished run: claiming, finishing, successors, cascades, closing."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.engine.runners import extend
from evertick.engine.runs import cancel
from tests.engine.world import Runner, end, key_of, make_dag, put, run_state, start, states, value

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}
DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


@pytest.mark.requirement("R4", "R5", "O1", "D2")
async def test_a_chain_runs_in_order_and_closes_its_run(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    assert await states(conn, run) == {"a": "available", "b": "waiting", "c": "waiting"}
    assert await runner.drain() == ["a", "b", "c"]
    assert await run_state(conn, run) == "success"
    assert await value(conn, "select count(*) from lease") == 0
    assert await value(conn, "select count(*) from ready_task") == 0


async def test_a_diamond_joins_once_both_sides_have_ended(conn: AsyncConnection) -> None:
    await put(conn, make_dag("diamond", DIAMOND))
    run = await start(conn, "diamond")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    await runner.finish(a)
    b, c = await runner.claim()
    await runner.finish(b)
    assert (await states(conn, run))["d"] == "waiting"
    await runner.finish(c)
    assert (await states(conn, run))["d"] == "available"


async def test_a_failure_cascades_to_everything_below_it_in_the_same_step(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    assert await runner.drain({"a": "failed"}) == ["a"]
    assert await states(conn, run) == {"a": "failed", "b": "upstream_failed", "c": "upstream_failed"}
    assert await run_state(conn, run) == "failed"


async def test_a_skip_cascades_and_the_run_succeeds(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    run = await start(conn, "chain")
    runner = await Runner.join(conn)
    await runner.drain({"a": "skipped"})
    assert await states(conn, run) == {"a": "skipped", "b": "skipped", "c": "skipped"}
    assert await run_state(conn, run) == "success"


@pytest.mark.requirement("R6", "I6")
async def test_a_failed_attempt_is_retried_until_its_budget_is_spent(conn: AsyncConnection) -> None:
    from evertick.domain.retry import RetryPolicy

    await put(conn, make_dag("flaky", {"a": []}, task_retry=RetryPolicy(retries=2, delay_seconds=0)))
    run = await start(conn, "flaky")
    runner = await Runner.join(conn)
    for attempt in (1, 2, 3):
        (claim,) = await runner.claim()
        assert (claim.attempt, claim.epoch) == (attempt, attempt)
        await runner.finish(claim, "failed", reason=f"boom {attempt}")
    assert await states(conn, run) == {"a": "failed"}
    found = await tasks.attempts(conn, key_of(claim))
    assert [(row.attempt, row.outcome, row.reason) for row in found] == [
        (1, "failed", "boom 1"),
        (2, "failed", "boom 2"),
        (3, "failed", "boom 3"),
    ]


@pytest.mark.requirement("I5", "M5 F5", "F8")
async def test_a_report_of_an_old_epoch_or_session_changes_nothing(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    mine, other = await Runner.join(conn), await Runner.join(conn)
    (claim,) = await mine.claim()
    assert await other.finish(claim) == [(key_of(claim), claim.epoch)]
    stale = claim._replace(epoch=claim.epoch - 1)
    assert await mine.finish(stale) == [(key_of(claim), stale.epoch)]
    assert await states(conn, run) == {"a": "running"}
    assert await value(conn, "select count(*) from result") == 0
    assert await value(conn, "select count(*) from attempt") == 0
    assert await value(conn, "select count(*) from log_chunk") == 0


@pytest.mark.requirement("M5 F5")
async def test_the_same_report_twice_is_one_event(conn: AsyncConnection) -> None:
    await put(conn, make_dag("chain", CHAIN))
    await start(conn, "chain")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    assert await runner.finish(claim, result=1) == []
    assert await runner.finish(claim, result=2) == []
    assert await value(conn, "select value from result") == 1
    assert await value(conn, "select open_tasks from run_status") == 2


@pytest.mark.requirement("K2")
async def test_extend_names_what_was_lost_what_to_stop_and_what_is_unknown(conn: AsyncConnection) -> None:
    await put(conn, make_dag("three", {"a": [], "b": [], "c": []}))
    run = await start(conn, "three")
    runner = await Runner.join(conn)
    a, b, _ = await runner.claim()
    held = [(key_of(a), a.epoch), (key_of(b), b.epoch + 7)]
    reply = await extend(conn, session=runner.session, held=held)
    assert reply.lost == [(key_of(b), b.epoch + 7)]
    assert len(reply.unknown) == 2
    await cancel(conn, run_id=run, actor=Actor("me"))
    reply = await extend(conn, session=runner.session, held=[(key_of(a), a.epoch)])
    assert reply.stop == [(key_of(a), a.epoch)]
    assert not reply.is_gone


async def test_a_claim_takes_the_most_urgent_first_and_the_oldest_of_those(conn: AsyncConnection) -> None:
    urgent = {"b": {"priority": 9}, "c": {"priority": 1}}
    await put(conn, make_dag("mixed", {"a": [], "b": [], "c": []}, per_task=urgent))
    await start(conn, "mixed")
    runner = await Runner.join(conn)
    order = []
    for _ in range(3):
        (claim,) = await runner.claim(1)
        order.append(claim.idx)
    assert order == [1, 0, 2]


async def test_results_arrive_with_the_claim_of_the_task_that_takes_them(conn: AsyncConnection) -> None:
    await put(conn, make_dag("pass", {"a": [], "b": ["a"]}, per_task={"b": {"inputs": ("a",)}}))
    await start(conn, "pass")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    assert a.inputs is None
    ((b,), _) = await runner.step([(a, "success", {"result": {"x": [1, 2]}})], free=5)
    assert b.inputs == '{"a": {"x": [1, 2]}}'


async def test_giving_back_offers_the_task_again_and_spends_nothing(conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    run = await start(conn, "one")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "given_back", reason="claim_reply_lost")
    assert await states(conn, run) == {"a": "available"}
    (again,) = await runner.claim()
    assert (again.attempt, again.epoch) == (1, 2)
    assert await runner.finish(claim) == [(key_of(claim), claim.epoch)]
    assert end(claim, "success") != ""
