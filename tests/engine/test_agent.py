"""An agent begins a dispatched attempt once, with a nonce of its own, and its end goes through the ordinary door (B3, K8, K9)."""

from __future__ import annotations

from dataclasses import replace
from typing import LiteralString

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.db.queries.runners import StartedRow
from evertick.domain.access import Actor
from evertick.domain.agent_protocol import AgentIdentity, TokenUse
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import Conflict, EvertickError, LeaseLost
from evertick.domain.retry import RetryPolicy
from evertick.engine.finish_and_claim import Exchange, encode_report
from evertick.engine.remote_attempts import (
    DispatchResult,
    NotStarted,
    claim_for_dispatch,
    end_queued,
    finish_attempt,
    start_attempt,
)
from evertick.engine.runners import extend, mark_runner_dead
from evertick.engine.runs import cancel
from tests.engine.invariants import install, violations
from tests.engine.world import Runner, make_dag, put, run_state, start, states, value

AGENT = {
    "runner_id": "et-1",
    "version": "1",
    "host": "pod",
    "boot_id": "b",
    "pid_namespace": "n",
    "uid": 0,
    "pid": 1,
    "pid_started": 1.0,
}
NONCE, OTHER = "a" * 32, "b" * 32
ALTERED: dict[str, LiteralString] = {
    "task of another epoch": "update task set epoch = epoch + 1 where session = %s",
    "task of another session": "update task set session = 77 where session = %s",
    "listed with another epoch": "update dispatch set epoch = epoch + 1 where session = %s",
    "listed with another session": "update dispatch set session = 77 where session = %s",
}


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await install(rollback_conn)
    return rollback_conn


async def dispatched(
    conn: AsyncConnection, shape: dict[str, list[str]] | None = None, **options: object
) -> AgentIdentity:
    """An attempt that was handed over, as its token names it."""
    await put(conn, make_dag("d", shape or {"t": []}, **options))
    runner = await Runner.join(conn, executor="far")
    await start(conn, "d")
    return await claimed(conn, runner.session)


async def claimed(conn: AsyncConnection, session: int) -> AgentIdentity:
    (row,) = await claim_for_dispatch(conn, session=session, queues=["default"], free=1)
    key = TaskKey(row.run_id, row.idx, row.map_index)
    return AgentIdentity(use=TokenUse.START, key=key, epoch=row.epoch, session=row.session, expires_at=0)


async def begin(conn: AsyncConnection, bearer: AgentIdentity, nonce: str = NONCE) -> StartedRow:
    return await start_attempt(conn, bearer, nonce=nonce, agent=AGENT, lost_after=300.0)


async def end(conn: AsyncConnection, bearer: AgentIdentity, kind: OutcomeKind = OutcomeKind.SUCCESS) -> Exchange:
    outcome = Outcome(key=bearer.key, epoch=bearer.epoch, kind=kind, reason="because", result_json="5")
    text = encode_report(outcome, policy=RetryPolicy(), attempt=1)
    return await finish_attempt(conn, session=bearer.session, report=text, infra_retries=3)


async def world_of(conn: AsyncConnection) -> object:
    """Everything that a start could have changed."""
    return [
        await value(conn, "select coalesce(jsonb_agg(to_jsonb(k)), '[]') from task k"),
        await value(conn, "select coalesce(jsonb_agg(to_jsonb(l)), '[]') from lease l"),
        await value(conn, "select coalesce(jsonb_agg(to_jsonb(d)), '[]') from dispatch d"),
        await value(conn, "select count(*) from runner"),
    ]


async def test_a_start_makes_it_run_under_a_session_of_its_own(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    row = await begin(conn, bearer)
    assert (row.verdict, row.attempt, row.params, row.inputs) == ("started", 1, "{}", None)
    assert await states(conn, bearer.key.run_id) == {"t": "running"}
    assert await value(conn, "select executor from runner where session = %s", bearer.session) == "far"
    assert await value(conn, "select lost_after_seconds from runner where session = %s", bearer.session) == 300
    assert await value(conn, "select nonce from dispatch where started_at is not null") == NONCE
    reply = await extend(conn, session=bearer.session, held=[(bearer.key, bearer.epoch)])
    assert not reply.is_gone and not (reply.lost or reply.stop or reply.unknown)
    assert not await violations(conn)


async def test_the_same_nonce_gets_the_same_answer_and_changes_nothing(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    first = await begin(conn, bearer)
    before = await world_of(conn)
    again = await begin(conn, bearer)
    assert again == replace(first, verdict="again") and await world_of(conn) == before


async def test_a_second_agent_is_refused_and_changes_nothing(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    await begin(conn, bearer)
    before = await world_of(conn)
    with pytest.raises(Conflict, match="Another agent"):
        await begin(conn, bearer, OTHER)
    assert await world_of(conn) == before


async def test_what_was_canceled_before_it_began_does_not_begin(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    await cancel(conn, run_id=bearer.key.run_id, actor=Actor("test"))
    before = await world_of(conn)
    with pytest.raises(Conflict, match="canceled"):
        await begin(conn, bearer)
    assert await world_of(conn) == before


@pytest.mark.parametrize("wrong", ["epoch", "session", "key", "over", "lost", "unlisted", *ALTERED])
async def test_an_attempt_that_is_not_the_tasks_own_does_not_begin(conn: AsyncConnection, wrong: str) -> None:
    bearer = await dispatched(conn, {"t": [], "u": []})
    await claimed(conn, int(str(await value(conn, "select owner from dispatch limit 1"))))
    match wrong:
        case "epoch":
            bearer = replace(bearer, epoch=bearer.epoch + 1)
        case "session":
            bearer = replace(bearer, session=bearer.session + 1)
        case "key":
            bearer = replace(bearer, key=bearer.key._replace(idx=1 - bearer.key.idx))
        case "over":
            await begin(conn, bearer)
            await end(conn, bearer)
        case "lost":
            gone = NotStarted(
                key=bearer.key,
                epoch=bearer.epoch,
                session=bearer.session,
                kind=DispatchResult.LOST,
                reason="dispatch_lost",
            )
            await end_queued(conn, [gone], infra_retries=3)
        case "unlisted":
            await conn.execute("delete from dispatch where session = %s", [bearer.session])
        case altered:
            # As after a failover that lost something: each of the two names both, and must be the one.
            await conn.execute(ALTERED[altered], [bearer.session])
    before = await world_of(conn)
    with pytest.raises(LeaseLost):
        await begin(conn, bearer)
    assert await world_of(conn) == before


async def test_it_is_given_what_a_claim_would_give(conn: AsyncConnection) -> None:
    spec = make_dag("d", {"up": [], "down": ["up"]}, per_task={"down": {"inputs": ("up",)}})
    await put(conn, spec)
    runner = await Runner.join(conn, executor="far")
    await start(conn, "d")
    first = await claimed(conn, runner.session)
    await begin(conn, first)
    await end(conn, first)
    row = await begin(conn, await claimed(conn, runner.session))
    assert row.inputs == '{"up": 5}'


async def test_an_end_is_recorded_once_and_the_agent_is_gone_with_it(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn, {"t": [], "u": []})
    await begin(conn, bearer)
    other = await claimed(conn, int(str(await value(conn, "select owner from dispatch"))))
    await begin(conn, other)
    for _ in range(2):
        done = await end(conn, bearer)
        assert not done.refused
    gone = "select end_reason from runner where session = %s"
    assert (await value(conn, gone, bearer.session), await value(conn, gone, other.session)) == ("finished", None)
    await end(conn, other)
    assert await run_state(conn, bearer.key.run_id) == "success"
    assert await value(conn, "select count(*) from lease") == 0
    assert await value(conn, "select count(*) from dispatch") == 2, "the executor may still have something of them"
    assert not await violations(conn)


async def test_an_end_of_another_attempt_is_refused_and_ends_no_agent(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    await begin(conn, bearer)
    old = replace(bearer, epoch=bearer.epoch - 1)
    assert (await end(conn, old)).refused == [(old.key, old.epoch)]
    other = replace(bearer, session=bearer.session + 1)
    assert (await end(conn, other)).refused == [(bearer.key, bearer.epoch)]
    assert await states(conn, bearer.key.run_id) == {"t": "running"}
    assert await value(conn, "select ended_at from runner where session = %s", bearer.session) is None


async def test_a_lost_agent_is_replaced_and_its_end_comes_too_late(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    await begin(conn, bearer)
    assert await mark_runner_dead(conn, session=bearer.session, reason="agent_lost: OOMKilled", infra_retries=3) == 1
    assert await states(conn, bearer.key.run_id) == {"t": "available"}
    reply = await extend(conn, session=bearer.session, held=[(bearer.key, bearer.epoch)])
    assert reply.is_gone
    assert (await end(conn, bearer)).refused
    assert await states(conn, bearer.key.run_id) == {"t": "available"}
    reason = await value(conn, "select end_reason from runner where session = %s", bearer.session)
    assert reason == "agent_lost: OOMKilled", "what is known of its end stays"


async def test_a_cancel_reaches_the_agent_and_is_confirmed_by_its_end(conn: AsyncConnection) -> None:
    bearer = await dispatched(conn)
    await begin(conn, bearer)
    assert await runners.disturbed(conn, [bearer.session]) == set()
    await cancel(conn, run_id=bearer.key.run_id, actor=Actor("test"))
    assert await runners.disturbed(conn, [bearer.session, 77]) == {bearer.session, 77}
    await end(conn, bearer, OutcomeKind.GIVEN_BACK)
    assert await states(conn, bearer.key.run_id) == {"t": "canceled"}
    assert not await violations(conn)


async def test_refusals_have_codes_that_agents_know() -> None:
    assert {Conflict.code, LeaseLost.code} == {"conflict", "lease_lost"}
    assert issubclass(LeaseLost, EvertickError)
