"""The runner API: what a join token allows, what a session may read and change, and who is woken."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.api.runner.auth import PREFIX
from evertick.api.runner.waiting import Waiter, chosen
from evertick.domain.access import Actor
from evertick.domain.errors import UserError
from evertick.engine import runner_tokens
from tests.api.conftest import Client, Signed
from tests.engine.world import make_dag, put, start, value

PLACE = {"host": "far", "boot_id": "b", "pid_namespace": "n", "uid": 0, "pid": 1, "pid_started": 1.0}


def joining(session: int, **changes: Any) -> dict[str, Any]:
    about = {"runner_id": "r", "version": "1", "slots": 4, "queues": ["default"], "lost_after_seconds": 90.0}
    return {"session": session, "place": PLACE, **about, **changes}


async def token(conn: AsyncConnection, *, days: float = 1.0, queues: tuple[str, ...] = ("default",)) -> tuple[int, str]:
    row, secret = await runner_tokens.create(conn, name="t", queues=queues, days=days, actor=Actor("test"))
    return row.token_id, secret


class Joined:
    """A session, as the API sees it."""

    def __init__(self, app: FastAPI, secret: str, session: int) -> None:
        self.app, self.session = app, session
        self._joiner = Client(app, secret)
        self.client = Client(app, None)

    async def join(self, **changes: Any) -> dict[str, Any]:
        told: dict[str, Any] = await self._joiner.ok("POST", f"{PREFIX}/join", json=joining(self.session, **changes))
        self.client = Client(self.app, told["token"])
        return told

    async def say(self, path: str, body: dict[str, Any], *, status: int = 200) -> Any:
        return await self.client.ok("POST", f"{PREFIX}{path}", json=body, status=status)

    async def claim(self, free: int = 4) -> list[dict[str, Any]]:
        claims: list[dict[str, Any]] = (await self.say("/exchange", {"free": free}))["claims"]
        return claims


def ref(claim: dict[str, Any]) -> list[int]:
    return [claim[name] for name in ("run_id", "idx", "map_index", "epoch")]


def report(claim: dict[str, Any], **more: Any) -> dict[str, Any]:
    run_id, idx, map_index, epoch = ref(claim)
    return {"r": run_id, "i": idx, "m": map_index, "e": epoch, "kind": "success", **more}


@pytest.mark.requirement("K1", "K2", "V2")
async def test_a_session_claims_reports_and_loses_nothing_when_it_repeats_itself(
    app: FastAPI, conn: AsyncConnection
) -> None:
    await put(conn, make_dag("d", {"a": [], "b": [], "c": ["a", "b"]}))
    run_id = await start(conn, "d")
    one = Joined(app, (await token(conn))[1], 11)
    assert (await one.join())["namesakes"] == [] and (await one.join())["token"], "joining again renews the token"
    first = await one.claim()
    assert len(first) == 2
    # An answer that was lost: the heartbeat names what the runner does not know, and it returns that.
    beat = await one.say("/heartbeat", {"held": [ref(first[0])]})
    assert (beat["unknown"], beat["lost"], beat["is_gone"]) == ([ref(first[1])], [], False)
    back = {"reports": [report(first[1], kind="given_back", reason="claim_reply_lost")], "free": 4}
    (again,) = (await one.say("/exchange", back))["claims"]
    assert (again["idx"], again["epoch"]) == (first[1]["idx"], first[1]["epoch"] + 1)
    done = {"reports": [report(first[0], result={"x": 1.5}), report(again)], "free": 4}
    (last,) = (await one.say("/exchange", done))["claims"]
    for _ in range(2):
        repeated = await one.say("/exchange", {"reports": [report(last)], "free": 0})
        assert (repeated["refused"], repeated["claims"]) == ([], []), "the same report twice is one event"
    # Of an earlier epoch nothing is stored, and its report is refused.
    assert (await one.say("/exchange", {"reports": [report(first[1])], "free": 0}))["refused"] == [ref(first[1])]
    assert await value(conn, "select state::text from run_status where run_id = %s", run_id) == "success"
    assert await value(conn, "select value from result where run_id = %s and idx = %s", run_id, first[0]["idx"]) == {
        "x": 1.5
    }


@pytest.mark.requirement("V3")
async def test_a_session_touches_only_what_it_holds(app: FastAPI, conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": [], "b": []}))
    await start(conn, "d")
    secret = (await token(conn))[1]
    one, other = Joined(app, secret, 11), Joined(app, (await token(conn))[1], 12)
    await one.join()
    await other.join()
    (mine,) = await one.claim(1)
    (foreign,) = await other.claim(1)
    assert (await one.say("/exchange", {"reports": [report(foreign)], "free": 0}))["refused"] == [ref(foreign)]
    ask = {"ref": ref(foreign), "wanted": [["secret", "x"]]}
    assert (await one.client.refused("POST", f"{PREFIX}/values", 409, json=ask))["code"] == "lease_lost"
    assert (await one.say("/values", {"ref": ref(mine), "wanted": []}))["values"] == []
    lines = {"offset": 0, "end": 3, "content": "abc"}
    for told, kept in ((mine, 1), (foreign, 0)):
        await one.say("/logs", {"session": 11, "chunks": [{"ref": ref(told), **lines}]})
        count = "select count(*) from log_chunk where run_id = %s and idx = %s"
        assert await value(conn, count, told["run_id"], told["idx"]) == kept
    refusal = await one.client.refused("POST", f"{PREFIX}/logs", 409, json={"session": 12, "chunks": []})
    assert refusal["code"] == "lease_lost", "the other session is alive, and came with another token"
    assert (await one.say("/dead", {"session": 12}, status=400))["code"] == "invalid"
    assert (await one.say("/sessions/live", {"sessions": [11, 12, 13]}))["sessions"] == [11, 12, 13]
    version = await one.client.ok("GET", f"{PREFIX}/versions/{mine['version_id']}")
    assert version["name"] == "d"
    await one.say("/exchange", {"reports": [report(mine)], "free": 0})
    for path in (f"/versions/{mine['version_id']}", f"/bundles/{'0' * 64}"):
        assert (await one.client.refused("GET", f"{PREFIX}{path}", 404))["code"] == "not_found"


@pytest.mark.requirement("A11")
async def test_a_token_that_is_revoked_or_expired_ends_its_runners_with_their_last_task(
    app: FastAPI, conn: AsyncConnection, signed: Signed
) -> None:
    await put(conn, make_dag("d", {"a": [], "b": [], "c": []}))
    await start(conn, "d")
    number, secret = await token(conn)
    one = Joined(app, secret, 11)
    await one.join()
    (mine,) = await one.claim(1)
    admin = await signed("admin")
    assert (await admin.ok("POST", f"/api/v1/runner-tokens/{number}/revoke"))["runners"] == 1
    assert await one.claim() == []
    beat = await one.say("/heartbeat", {"held": [ref(mine)]})
    assert (beat["request"], beat["lost"], beat["unknown"]) == ("leave", [], [])
    refusal = await one._joiner.refused("POST", f"{PREFIX}/join", 401, json=joining(11))
    assert "was revoked: make a new one with `evertick runners token create`" in refusal["detail"]
    assert (await one.say("/exchange", {"reports": [report(mine)], "free": 4}))["refused"] == []

    number, secret = await token(conn)
    two = Joined(app, secret, 12)
    await two.join()
    (its,) = await two.claim(1)
    await conn.execute("update runner_token set expires_at = clock() where token_id = %s", [number])
    assert (await two.say("/heartbeat", {"held": [ref(its)]}))["request"] == "leave"
    assert await two.claim() == []
    refusal = await two._joiner.refused("POST", f"{PREFIX}/join", 401, json=joining(13))
    assert "expired at" in refusal["detail"]
    actions = "select array_agg(action order by entry_id) from audit_log where action like '%%runner_token%%'"
    assert await value(conn, actions) == ["add_runner_token", "revoke_runner_token", "add_runner_token"]
    assert await value(conn, "select count(*) from runner_token where secret_hash = %s", secret.encode()) == 0


async def test_a_token_serves_only_its_queues_and_its_session_no_other_token(
    app: FastAPI, conn: AsyncConnection
) -> None:
    secret = (await token(conn, queues=("gpu",)))[1]
    one = Joined(app, secret, 11)
    refusal = await one._joiner.refused("POST", f"{PREFIX}/join", 403, json=joining(11, queues=["gpu", "default"]))
    assert "is for the queues gpu, not for default" in refusal["detail"]
    await one.join(queues=["gpu"])
    thief = Joined(app, (await token(conn, queues=("gpu",)))[1], 11)
    assert (await thief._joiner.refused("POST", f"{PREFIX}/join", 401, json=joining(11, queues=["gpu"])))[
        "code"
    ] == "refused"
    for bad in ({"queues": [], "days": 1}, {"queues": ["a b"], "days": 1}, {"queues": ["a"], "days": 0}):
        with pytest.raises(UserError):
            await runner_tokens.create(conn, name="t", actor=Actor("test"), **bad)  # type: ignore[arg-type]


@pytest.mark.requirement("N28")
async def test_an_interrupted_upload_continues_and_a_report_must_not_name_what_did_not_arrive(
    app: FastAPI, conn: AsyncConnection, context: ApiContext, tmp_path: Path
) -> None:
    context.settings = replace(context.settings, home=tmp_path)
    await put(conn, make_dag("d", {"a": []}))
    await start(conn, "d")
    one = Joined(app, (await token(conn))[1], 11)
    await one.join()
    (mine,) = await one.claim(1)
    content = b'"' + b"x" * 3000 + b'"'
    sha256 = hashlib.sha256(content).hexdigest()
    named = {"$evertick": "file", "sha256": sha256, "bytes": len(content)}
    done = {"reports": [report(mine, result=named)], "free": 0}
    assert "was not uploaded" in (await one.say("/exchange", done, status=400))["detail"]
    path = f"{PREFIX}/attempts/{'/'.join(map(str, ref(mine)))}/results/{sha256}"

    # What a request that broke off leaves behind; see tests/runner/test_https.py.
    stored = context.settings.result_place / str(mine["run_id"]) / sha256
    stored.parent.mkdir(parents=True)
    stored.with_name(f".{sha256}.part").write_bytes(content[:1000])
    at = (await one.client.ok("GET", f"{path}/upload"))["bytes"]
    assert at == 1000
    assert (await one.client.ok("PUT", f"{path}?offset=7", status=409, content=content[7:]))["code"] == "conflict"
    assert (await one.client.ok("PUT", f"{path}?offset={at}", content=content[at:]))["is_complete"]
    assert (await one.client.ok("GET", f"{path}/upload"))["is_complete"]
    assert stored.read_bytes() == content
    assert (await one.say("/exchange", done))["refused"] == []


def waiter(session: int, *queues: str, free: int = 1, has_patterns: bool = False) -> Waiter:
    return Waiter(session=session, queues=frozenset(queues), has_patterns=has_patterns, free=free, request="")


def test_as_many_runners_are_woken_as_the_tasks_need_and_the_first_that_waits_is_first() -> None:
    waiting = [waiter(1, "a", free=0), waiter(2, "b"), waiter(3, "a", free=2), waiter(4, "a"), waiter(5, "a", "b")]
    mine = {each.session: each for each in waiting}

    def woken(**depths: int) -> list[int]:
        return [each.session for each in chosen(mine, depths)]

    assert woken(a=1) == [3]
    assert woken(a=3) == [3, 4]
    assert woken(a=9) == [3, 4, 5]
    assert woken(b=1) == [2]
    assert woken(a=1, b=2) == [2, 3, 5]
    assert woken(c=5) == woken() == []
    mine = {9: waiter(9, "a", has_patterns=True), **mine}
    assert woken(a=1) == [9, 3], "a runner with patterns may serve none of them"
