"""Events and approvals over HTTP: who may, what is answered, and what a second decision is told."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.access import Role
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from tests.api.conftest import Client, Signed
from tests.engine.world import make_dag, put, start, states

V1 = "/api/v1"
FORM = declare_params({"version": Param(type=int, required=True)})


async def asked(conn: AsyncConnection, **more: object) -> int:
    wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release?", form=FORM, **more)  # type: ignore[arg-type]
    task = {"kind": TaskKind.WAIT, "wait": wait}
    await put(conn, make_dag("d", {"ask": []}, per_task={"ask": task}, tags=("finance",)))
    return await start(conn, "d")


async def test_an_event_is_sent_once_per_key(admin: Client, signed: Signed) -> None:
    key = {"Idempotency-Key": "k1"}
    made = await admin.ok("POST", f"{V1}/events/file", status=201, json={"payload": [1]}, headers=key)
    again = await admin.ok("POST", f"{V1}/events/file", json={"payload": [1]}, headers=key)
    await admin.refused("POST", f"{V1}/events/file", 409, json={"payload": [2]}, headers=key)
    await admin.refused("POST", f"{V1}/events/file", 409, headers=key)
    assert (made["is_new"], again["is_new"], again["event_id"]) == (True, False, made["event_id"])
    await admin.ok("POST", f"{V1}/events/other", status=201)
    (listed,) = (await admin.ok("GET", f"{V1}/events/sent?name=file"))["items"]
    assert (listed["payload"], listed["sent_by"]) == ([1], "user:root")
    await admin.refused("POST", f"{V1}/events/%20x", 400)
    await admin.refused("POST", f"{V1}/events/x", 422, json={"paylaod": 1})
    await (await signed(Role.VIEWER)).refused("POST", f"{V1}/events/x", 403)


async def test_an_approval_is_decided_once_by_who_may(admin: Client, signed: Signed, conn: AsyncConnection) -> None:
    run = await asked(conn, approvers=Role.EDITOR)
    path = f"{V1}/runs/{run}/tasks/ask/approval"
    (listed,) = (await admin.ok("GET", f"{V1}/approvals"))["items"]
    assert (listed["title"], listed["approvers"], listed["is_open"]) == ("Release?", "editor", True)
    assert listed["form"][0]["name"] == "version"
    yes = {"is_approved": True, "fields": {"version": 2}, "note": "ok"}
    await (await signed(Role.OPERATOR)).refused("POST", path, 403, json=yes)
    await admin.refused("POST", path, 400, json={"is_approved": True})
    done = await admin.ok("POST", path, json=yes)
    assert (done["decided_by"], done["fields"], done["is_open"]) == ("user:root", {"version": 2}, False)
    assert (await states(conn, run))["ask"] == "success"
    told = await admin.refused("POST", path, 409, json={"is_approved": False})
    assert "was approved by user:root" in str(told)
    assert (await admin.ok("GET", path))["is_approved"] is True
    assert (await admin.ok("GET", f"{V1}/approvals"))["items"] == []


async def test_who_is_limited_to_tags_sees_only_their_approvals(signed: Signed, conn: AsyncConnection) -> None:
    run = await asked(conn)
    stranger, friend = await signed(Role.OPERATOR, ["other"]), await signed(Role.OPERATOR, ["finance"])
    assert (await stranger.ok("GET", f"{V1}/approvals"))["items"] == []
    await stranger.refused("POST", f"{V1}/runs/{run}/tasks/ask/approval", 404, json={"is_approved": False})
    assert len((await friend.ok("GET", f"{V1}/approvals"))["items"]) == 1
    await friend.ok("POST", f"{V1}/runs/{run}/tasks/ask/approval", json={"is_approved": False})
