"""What agents are answered: the order, a word to stop, how far their log is stored; and never what is another's (B3, K9)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.config import Settings
from evertick.db.queries import logs
from evertick.domain.access import Actor
from evertick.domain.agent_protocol import AgentIdentity, TokenUse, read_order
from evertick.domain.encryption import new_key
from evertick.domain.stored_values import ValueKind
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.secrets import put_value
from evertick.secrets.agent_tokens import AgentKeys
from evertick.secrets.keyring import load_keyring
from evertick.ui.app import make_app
from tests.api.agents import AGENT, NONCE, Dispatched, dispatch_all, dispatch_more
from tests.api.conftest import Client
from tests.engine.world import run_state, states, value

CANARY = "canary-8d1f0c"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        api_rate_limit=0,
        agent_key=("k" * 43,),
        home=tmp_path,
        secret_keys=(new_key(),),
        heartbeat_seconds=0.5,
        result_spill_bytes=2048,
        result_max_bytes=100_000,
    )


@pytest.fixture
async def one(app: FastAPI, context: ApiContext, conn: AsyncConnection) -> Dispatched:
    return (await dispatch_all(app, context, conn))[0]


async def finish(caller: Client, status: int = 200, **fields: object) -> object:
    return await caller.ok("POST", f"{AGENT}/finish", status=status, json={"kind": "success", **fields})


async def test_a_start_is_answered_with_the_whole_order(one: Dispatched, conn: AsyncConnection) -> None:
    answer = await one.begin()
    told = read_order(answer)
    assert (told.order.key, told.order.epoch, told.order.session) == (one.key, one.row.epoch, one.row.session)
    assert (told.order.dag, told.order.task, told.order.bundle, told.order.file) == ("d", "t", "b", "f.py")
    assert told.limits.lost_after_seconds == 300 and told.limits.heartbeat_seconds == 0.5
    assert await states(conn, one.key.run_id) == {"t": "running"}
    assert read_order(await one.begin()).order == told.order, "the same nonce is the same agent"
    refused = await one.begin("b" * 32, status=409)
    assert refused["code"] == "conflict" and "Another agent" in refused["detail"]
    # Its renewal token is good to ask again, too.
    await Client(one.app, told.renewal).ok(
        "POST", f"{AGENT}/start", status=422, json={"nonce": NONCE, "version": "1", "place": {}}
    )


async def test_refusals_of_agents_are_on_record_once_a_minute(one: Dispatched, conn: AsyncConnection) -> None:
    await one.begin()
    for _ in range(3):
        await one.begin("b" * 32, status=409)
    assert await value(conn, "select count(*) from audit_log where action = 'refuse'") == 1
    assert await value(conn, "select detail->>'why' from audit_log where action = 'refuse'") == "conflict"


async def test_what_a_task_is_granted_goes_to_its_own_agent_alone(
    app: FastAPI, context: ApiContext, conn: AsyncConnection
) -> None:
    keyring = load_keyring(context.settings)
    await put_value(conn, keyring, kind=ValueKind.SECRET, name="db", value=CANARY, actor=Actor("test"))
    granted, plain = await dispatch_all(app, context, conn, {"a": [], "b": []}, per_task={"a": {"secrets": ("db",)}})
    answer = await granted.begin()
    assert json.loads(answer["order"]["granted_json"])["secret"] == {"db": CANARY}
    assert CANARY not in repr(read_order(answer))
    assert CANARY not in json.dumps(await plain.begin())


async def test_a_secret_that_nobody_has_fails_the_attempt_and_says_so(
    app: FastAPI, context: ApiContext, conn: AsyncConnection
) -> None:
    (one,) = await dispatch_all(app, context, conn, task_secrets=("db",))
    problem = await one.begin(status=409)
    assert "secret 'db' is not set" in problem["detail"]
    assert await run_state(conn, one.key.run_id) == "failed"
    assert (await one.begin(status=409))["code"] == "lease_lost"


async def test_a_heartbeat_waits_for_a_word_and_hears_a_cancel_at_once(one: Dispatched, conn: AsyncConnection) -> None:
    await one.begin()
    calm = await one.agent.ok("POST", f"{AGENT}/heartbeat", json={"wait_seconds": 0.01})
    assert (calm["word"], calm["rest_seconds"]) == ("continue", 0.0)
    still = await one.agent.ok("POST", f"{AGENT}/heartbeat", json={})
    assert still["rest_seconds"] == 0.5, "who does not wait rests"
    await Client(one.app, calm["token"]).ok("POST", f"{AGENT}/heartbeat", json={})
    one.context.settings = Settings(heartbeat_seconds=60, lost_after_seconds=180, api_rate_limit=0)
    waiting = asyncio.create_task(one.agent.ok("POST", f"{AGENT}/heartbeat", json={"wait_seconds": 60}))
    await asyncio.sleep(0)
    await cancel(conn, run_id=one.key.run_id, actor=Actor("test"))
    async with asyncio.timeout(20):
        assert (await waiting)["word"] == "stop"


async def test_a_heartbeat_of_one_that_was_given_up_is_told_so(one: Dispatched, conn: AsyncConnection) -> None:
    await one.begin()
    await mark_runner_dead(conn, session=one.row.session, reason="agent_lost", infra_retries=3)
    answer = await one.agent.ok("POST", f"{AGENT}/heartbeat", json={"wait_seconds": 60})
    assert (answer["word"], answer["token"], answer["renewal"]) == ("lost", "", "")
    assert (await finish(one.agent, 409, result_json="1"))["code"] == "lease_lost"  # type: ignore[index]
    assert await states(conn, one.key.run_id) == {"t": "available"}


async def test_where_connections_are_few_agents_come_again_by_themselves(one: Dispatched) -> None:
    await one.begin()
    one.context.settings = Settings(api_connections=8, heartbeat_seconds=7)
    one.context.stop_requests._waiting = dict.fromkeys(range(4), asyncio.Event())
    answer = await one.agent.ok("POST", f"{AGENT}/heartbeat", json={"wait_seconds": 60})
    assert (answer["word"], answer["rest_seconds"]) == ("continue", 7.0)


async def test_a_log_sent_twice_is_stored_once_and_late_lines_are_marked(
    one: Dispatched, conn: AsyncConnection
) -> None:
    await one.begin()
    chunks = [{"offset": 0, "end": 4, "content": "one\n"}, {"offset": 4, "end": 8, "content": "t\x00o\n"}]
    for sent in (chunks[:1], chunks, chunks, [{"offset": 2, "end": 9, "content": "overlap\n"}]):
        answer = await one.agent.ok("POST", f"{AGENT}/logs", json={"chunks": sent})
    assert answer == {"until": 8} == await one.agent.ok("POST", f"{AGENT}/logs", json={"chunks": []})
    await finish(one.agent, log={"offset": 8, "end": 12, "content": "end\n"})
    await one.agent.ok("POST", f"{AGENT}/logs", json={"chunks": [{"offset": 12, "end": 17, "content": "late\n"}]})
    stored = await logs.read(conn, one.key)
    assert [each.content for each in stored] == ["one\n", "t\ufffdo\n", "end\n", "late\n"]
    assert [each.is_late for each in stored] == [False, False, False, True]


async def test_a_finish_is_recorded_once_however_often_it_is_told(one: Dispatched, conn: AsyncConnection) -> None:
    await one.begin()
    for _ in range(3):
        await finish(one.agent, result_json='{"rows": 5}')
    assert await run_state(conn, one.key.run_id) == "success"
    assert await value(conn, "select value::text from result") == '{"rows": 5}'
    # The other story comes too late, and changes nothing.
    await finish(one.agent, kind="failed", reason="no")
    assert await run_state(conn, one.key.run_id) == "success"


@pytest.mark.parametrize("text", ["{", "1, 2", "NaN", '1}, {"r": 1', "[" * 100_000, ""])
async def test_a_result_that_is_not_one_value_is_refused(one: Dispatched, text: str) -> None:
    await one.begin()
    await finish(one.agent, 400, result_json=text)


async def test_what_the_database_cannot_hold_fails_the_attempt_instead_of_staying_for_ever(
    one: Dispatched, conn: AsyncConnection
) -> None:
    await one.begin()
    await finish(one.agent, result_json='"\\u0000"')
    assert await run_state(conn, one.key.run_id) == "failed"


async def test_a_branch_is_judged_as_on_a_runner(app: FastAPI, context: ApiContext, conn: AsyncConnection) -> None:
    shape = {"pick": [], "a": ["pick"], "b": ["pick"]}
    (one,) = await dispatch_all(app, context, conn, shape, per_task={"pick": {"choice": "branch"}})
    await one.begin()
    await finish(one.agent, result_json='"b"')
    assert await states(conn, one.key.run_id) == {"pick": "success", "a": "skipped", "b": "available"}


# What is another's -------------------------------------------------------------------------------------------------------


def large(letter: str) -> tuple[bytes, str, str]:
    raw = json.dumps(letter * 3000).encode()
    digest = hashlib.sha256(raw).hexdigest()
    return raw, digest, json.dumps({"$evertick": "file", "sha256": digest, "bytes": len(raw)})


async def test_a_large_result_is_sent_first_and_only_those_below_can_read_it(
    app: FastAPI, context: ApiContext, conn: AsyncConnection
) -> None:
    shape = {"up": [], "other": [], "down": ["up"]}
    up, other = await dispatch_all(app, context, conn, shape, per_task={"down": {"inputs": ("up",)}})
    raw, digest, reference = large("x")
    await up.begin()
    await other.begin()
    assert "PUT it" in (await finish(up.agent, 400, result_json=reference))["detail"]  # type: ignore[index]
    await up.agent.refused("PUT", f"{AGENT}/results/{digest}", 400, content=raw + b" ")
    await up.agent.refused("PUT", f"{AGENT}/results/{digest}", 413, content=b"x" * 100_001)
    for _ in range(2):
        assert (await up.agent.put(f"{AGENT}/results/{digest}", content=raw)).status_code == 204
    await finish(up.agent, result_json=reference)
    session = int(str(await value(conn, "select owner from dispatch limit 1")))
    (down,) = await dispatch_more(app, context, conn, session)
    await down.begin()
    assert (await down.agent.get(f"{AGENT}/results/{digest}")).content == raw
    await other.agent.refused("GET", f"{AGENT}/results/{digest}", 404)
    folder = context.settings.result_place / str(up.key.run_id)
    assert [each.name for each in folder.iterdir()] == [digest]
    (folder / digest).unlink()
    assert "EVERTICK_RESULTS_FOLDER" in (await down.agent.refused("GET", f"{AGENT}/results/{digest}", 410))["detail"]


async def test_code_is_given_to_its_own_attempts_while_they_run(one: Dispatched, conn: AsyncConnection) -> None:
    mine, others = "1" * 64, "2" * 64
    for each in (mine, others):
        await conn.execute(
            "insert into bundle (hash, file, archive, created_at) values (%s, 'f', 'zip', clock())", [each]
        )
    await conn.execute("update dag_version set bundle_hash = %s", [mine])
    await one.agent.refused("GET", f"{AGENT}/bundles/{mine}", 409)
    await one.begin()
    assert (await one.agent.get(f"{AGENT}/bundles/{mine}")).content == b"zip"
    await one.agent.refused("GET", f"{AGENT}/bundles/{others}", 404)
    await one.agent.refused("GET", f"{AGENT}/bundles/..%2f..%2fetc%2fpasswd", 404)
    await finish(one.agent)
    await one.agent.refused("GET", f"{AGENT}/bundles/{mine}", 409)
    await one.agent.refused("PUT", f"{AGENT}/results/{mine}", 409, content=b"x")


async def test_a_token_speaks_for_its_own_attempt_alone(
    app: FastAPI, context: ApiContext, conn: AsyncConnection
) -> None:
    """Everything that is changed is taken from the token; nothing in a body can name another task."""
    first, second = await dispatch_all(app, context, conn, {"a": [], "b": []})
    await first.begin()
    await second.begin()
    await finish(first.agent, 422, run_id=second.key.run_id)
    await finish(first.agent)
    assert await states(conn, first.key.run_id) == {"a": "success", "b": "running"}
    forged = context.agent_tokens.make_attempt_token(key=second.key, epoch=second.row.epoch, session=first.row.session)
    await finish(Client(app, forged), 409)
    assert await states(conn, first.key.run_id) == {"a": "success", "b": "running"}


async def test_an_expired_token_is_refused_and_the_start_token_gives_a_new_one(one: Dispatched) -> None:
    await one.begin()
    keys = AgentKeys(one.context.settings.agent_key)
    past = AgentIdentity(
        use=TokenUse.ATTEMPT, key=one.key, epoch=one.row.epoch, session=one.row.session, expires_at=10**9
    )
    refused = await Client(one.app, keys.sign(past)).refused("POST", f"{AGENT}/heartbeat", 401, json={})
    assert "expired" in refused["detail"]
    again = await one.begin()
    await Client(one.app, again["token"]).ok("POST", f"{AGENT}/heartbeat", json={})


async def test_thousands_behind_one_address_do_not_count_as_one(context: ApiContext, one: Dispatched) -> None:
    await one.begin()
    context.settings = Settings(api_rate_limit=1.0, agent_key=("k" * 43,), heartbeat_seconds=0.5)
    limited = make_app(context)
    for turn in range(40):
        token = context.agent_tokens.make_attempt_token(
            key=one.key, epoch=one.row.epoch, session=one.row.session + turn
        )
        answer = await Client(limited, token).post(f"{AGENT}/heartbeat", json={})
        assert answer.status_code == 200, (turn, answer.text)
    strangers = [await Client(limited, f"eva_wrong{turn}").post(f"{AGENT}/heartbeat", json={}) for turn in range(40)]
    assert {answer.status_code for answer in strangers} == {401, 429}
