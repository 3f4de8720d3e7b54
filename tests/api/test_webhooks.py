"""Webhooks and dead letters over HTTP: a signed delivery is stored once before the answer, anything else is refused."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.access import Role
from evertick.domain.encryption import new_key
from evertick.domain.inbound.webhooks import MOST_WEBHOOK_BYTES
from tests.api.conftest import ORDINARY, Client, Signed
from tests.engine.world import make_dag, put, value

SECRET = "a secret of enough characters"
V1 = "/api/v1"


@pytest.fixture
def settings() -> Settings:
    return Settings(api_rate_limit=0, agent_key=ORDINARY.agent_key, secret_keys=(new_key(),))


def github(body: bytes, delivery: str = "d1") -> dict[str, Any]:
    signature = "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Hub-Signature-256": signature, "X-GitHub-Event": "push", "X-GitHub-Delivery": delivery}
    return {"content": body, "headers": headers}


async def test_a_signed_webhook_is_stored_once_before_the_answer(
    admin: Client, nobody: Client, signed: Signed, conn: AsyncConnection
) -> None:
    await admin.ok("PUT", f"{V1}/secrets/hook", status=201, json={"value": SECRET})
    wanted = {"kind": "github", "secret": "hook", "event": "github.{type}"}
    await admin.ok("PUT", f"{V1}/webhooks/repo", status=201, json=wanted)
    await admin.ok("PUT", f"{V1}/webhooks/repo", status=200, json=wanted)
    await admin.refused("PUT", f"{V1}/webhooks/repo", 400, json={**wanted, "event": "{x}"})
    viewer = await signed(Role.OPERATOR)
    await viewer.refused("PUT", f"{V1}/webhooks/repo", 403, json=wanted)
    assert [each["name"] for each in (await viewer.ok("GET", f"{V1}/webhooks"))["items"]] == ["repo"]
    assert (await viewer.ok("GET", f"{V1}/webhooks/repo"))["event"] == "github.{type}"

    body = json.dumps({"ref": "main"}).encode()
    for _ in range(2):
        await nobody.ok("POST", f"{V1}/hooks/repo", status=202, **github(body))
    sent = (await admin.ok("GET", f"{V1}/events/sent"))["items"]
    assert [(each["name"], each["key"], each["payload"], each["sent_by"]) for each in sent] == [
        ("github.push", "d1", {"ref": "main"}, "webhook:repo")
    ]
    await nobody.refused("POST", f"{V1}/hooks/repo", 401, **{**github(body), "content": body + b" "})
    await nobody.refused("POST", f"{V1}/hooks/other", 401, **github(body))
    await nobody.refused("POST", f"{V1}/hooks/repo", 409, **github(b"{}"))
    await nobody.refused("POST", f"{V1}/hooks/repo", 413, **github(b"x" * (MOST_WEBHOOK_BYTES + 1), "d2"))
    await admin.ok("DELETE", f"{V1}/secrets/hook", status=204)
    await nobody.refused("POST", f"{V1}/hooks/repo", 401, **github(body))
    await admin.ok("DELETE", f"{V1}/webhooks/repo", status=204)
    await admin.refused("DELETE", f"{V1}/webhooks/repo", 404)
    assert await value(conn, "select count(*) from event") == 1


async def test_dead_letters_are_listed_and_replayed(admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"t": []}))
    await conn.execute(
        "insert into dead_letter (dag, params, sent_at, sent_by, reason, failed_at)"
        " select 'etl', '{}', clock(), 'shop', 'reason ' || n, clock() from generate_series(1, 3) n"
    )
    letters = f"{V1}/dead-letters"
    first = await admin.ok("GET", letters, params={"limit": 2})
    assert [each["letter_id"] for each in first["items"]] == [3, 2]
    assert (await admin.ok("GET", f"{letters}/2"))["reason"] == "reason 2"
    assert (await admin.ok("POST", f"{letters}/2/replay"))["replayed_by"] == "user:root"
    await admin.refused("POST", f"{letters}/2/replay", 409)
    await admin.refused("POST", f"{letters}/9/replay", 404)
    assert await admin.ok("POST", f"{letters}/replay", json={"letter_ids": [1, 2, 3]}) == {"count": 2}
    assert (await admin.ok("GET", letters))["items"] == []
    assert len((await admin.ok("GET", letters, params={"with_replayed": True}))["items"]) == 3
    assert await value(conn, "select count(*) from inbox") == 3


async def test_a_run_can_begin_later_and_be_unique_for_a_period(admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"t": []}))
    later = {"run_after": "2090-01-01T00:00:00Z"}
    made = await admin.ok("POST", f"{V1}/dags/etl/runs", status=201, json=later)
    found = await admin.ok("GET", f"{V1}/runs/{made['run_id']}")
    assert (found["state"], found["start_at"]) == ("queued", "2090-01-01T00:00:00Z")
    why = await admin.ok("GET", f"{V1}/runs/{made['run_id']}/tasks/t/why")
    assert [each["kind"] for each in why["reasons"]] == ["run_delayed"]
    period = {"unique_for_seconds": 60}
    one = await admin.ok("POST", f"{V1}/dags/etl/runs", status=201, json=period)
    assert await admin.ok("POST", f"{V1}/dags/etl/runs", status=200, json=period) == {**one, "is_new": False}
    run = {"logical_date": None, "run_after": "2091-01-01T00:00:00Z"}
    made = await admin.ok("POST", "/api/v2/dags/etl/dagRuns", json=run)
    assert (made["state"], made["run_after"]) == ("queued", "2091-01-01T00:00:00Z")
