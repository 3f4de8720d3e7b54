"""The native API does what the engine does: written by one door, read by the other, and values compared."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags, logs, runs
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor, Role
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.engine.gates import set_pool
from tests.api.conftest import Client, Signed
from tests.engine.world import Runner, make_dag, put, run_state, start, states, value

V1 = "/api/v1"


@pytest.fixture
async def etl(conn: AsyncConnection) -> int:
    spec = make_dag(
        "etl",
        {"extract": [], "load": ["extract"]},
        every="@every 1h",
        tags=("finance", "daily"),
        description="Loads orders.",
        params=(ParamSpec(name="rows", type=ParamType.INTEGER, default=10),),
    )
    return await put(conn, spec)


async def everything(client: Client, path: str, **params: Any) -> list[Any]:
    """All items, page by page."""
    found: list[Any] = []
    cursor = None
    for _ in range(100):
        page = await client.ok("GET", path, params={**params, **({"cursor": cursor} if cursor else {})})
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found
    raise AssertionError("it never ends")


async def test_dags_are_listed_shown_paused_and_deleted(admin: Client, conn: AsyncConnection, etl: int) -> None:
    await put(conn, make_dag("alone", {"t": []}))
    listed = await everything(admin, f"{V1}/dags", limit=1)
    assert [dag["name"] for dag in listed] == ["alone", "etl"]
    shown = await admin.ok("GET", f"{V1}/dags/etl")
    assert (shown["description"], shown["tags"], shown["task_count"]) == ("Loads orders.", ["finance", "daily"], 2)
    assert [(task["name"], task["upstream"], task["downstream"]) for task in shown["tasks"]] == [
        ("extract", [], ["load"]),
        ("load", ["extract"], []),
    ]
    assert [each["name"] for each in shown["params"]] == ["rows"]
    for query, names in (
        ({"tag": "finance"}, ["etl"]),
        ({"tag": "other"}, []),
        ({"contains": "TL"}, ["etl"]),
        ({"contains": "%"}, []),
        ({"is_paused": "true"}, []),
        ({"is_paused": "false"}, ["alone", "etl"]),
    ):
        assert [dag["name"] for dag in await everything(admin, f"{V1}/dags", **query)] == names, query
    assert await admin.ok("POST", f"{V1}/dags/etl/pause") == {"is_changed": True}
    assert await admin.ok("POST", f"{V1}/dags/etl/pause") == {"is_changed": False}
    row = await dags.find(conn, "etl")
    assert row is not None and row.paused
    assert await admin.ok("POST", f"{V1}/dags/etl/unpause", json={"catch_up": "latest"}) == {
        "is_changed": True,
        "missed": [],
    }
    versions = await everything(admin, f"{V1}/dags/etl/versions")
    assert [each["number"] for each in versions] == [1]
    assert (await admin.ok("GET", f"{V1}/dags/etl/versions/1"))["spec"]["name"] == "etl"
    await admin.refused("GET", f"{V1}/dags/etl/versions/2", 404)
    await admin.ok("DELETE", f"{V1}/dags/etl", status=204)
    await admin.refused("GET", f"{V1}/dags/etl", 404)


@pytest.mark.requirement("M3", "R7")
async def test_a_run_is_triggered_once_per_key_followed_and_canceled(
    admin: Client, conn: AsyncConnection, etl: int
) -> None:
    made = await admin.ok(
        "POST", f"{V1}/dags/etl/runs", status=201, json={"params": {"rows": 5}}, headers={"Idempotency-Key": "k1"}
    )
    again = await admin.ok("POST", f"{V1}/dags/etl/runs", json={}, headers={"Idempotency-Key": "k1"})
    assert again == {"run_id": made["run_id"], "is_new": False}
    told = await admin.refused(
        "POST", f"{V1}/dags/etl/runs", 409, json={"params": {"rows": 6}}, headers={"Idempotency-Key": "k1"}
    )
    assert told["detail"] == f"Key 'k1' belongs to run {made['run_id']}, whose 'rows' differs: choose another key."
    row = await runs.find(conn, made["run_id"])
    assert row is not None and (row.params, row.triggered_by) == ({"rows": 5}, "user:root")
    await admin.refused("POST", f"{V1}/dags/etl/runs", 400, json={"params": {"rows": "many"}})
    await admin.refused("POST", f"{V1}/dags/etl/runs", 422, json={"state": "success"})
    await admin.refused("POST", f"{V1}/dags/none/runs", 404, json={})
    for_a_day = {"fire_at": "2026-11-01T00:00:00+01:00"}
    dated = await admin.ok("POST", f"{V1}/dags/etl/runs", status=201, json=for_a_day)
    assert (await admin.ok("GET", f"{V1}/runs/{dated['run_id']}"))["fire_at"] == "2026-10-31T23:00:00Z"
    told = await admin.refused("POST", f"{V1}/dags/etl/runs", 409, json=for_a_day)
    assert f"already has run {dated['run_id']} for" in told["detail"]
    for wrong in ("2026-11-01T00:00:00", "0001-01-01T00:00:00Z"):
        await admin.refused("POST", f"{V1}/dags/etl/runs", 400, json={"fire_at": wrong})
    path = f"{V1}/runs/{made['run_id']}"
    shown = await admin.ok("GET", path)
    assert (shown["state"], shown["tasks_by_state"]) == ("running", {"available": 1, "waiting": 1})
    assert [entry["verb"] for entry in shown["audit"]] == ["trigger"]
    assert (await admin.ok("GET", f"{path}/wait", params={"seconds": 0}))["state"] == "running"
    assert await admin.ok("POST", f"{path}/cancel", json={"reason": "wrong rows"}) == {"stopping": 0}
    waited = await admin.ok("GET", f"{path}/wait")
    assert (waited["state"], waited["reason"]) == ("canceled", "wrong rows")
    await admin.refused("POST", f"{path}/cancel", 409)
    await admin.refused("GET", f"{V1}/runs/{2**62}", 404)


async def test_runs_come_in_pages_newest_first_and_a_filter_looks_at_a_window(
    admin: Client, conn: AsyncConnection, etl: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(conn, make_dag("other", {"t": []}))
    mine = [await start(conn, "etl") for _ in range(4)]
    theirs = [await start(conn, "other") for _ in range(3)]
    await admin.ok("POST", f"{V1}/runs/{mine[0]}/cancel")
    monkeypatch.setattr("evertick.operations.runs.WINDOW", 2)

    async def found(**query: Any) -> list[int]:
        return [run["run_id"] for run in await everything(admin, f"{V1}/runs", **query)]

    assert await found(limit=2) == [*reversed(theirs), *reversed(mine)]
    assert await found(limit=2, dag="etl") == list(reversed(mine))
    assert await found(limit=2, state="canceled") == [mine[0]]
    assert await found(limit=1, dag="other", state="canceled") == []
    await admin.refused("GET", f"{V1}/runs", 400, params={"cursor": "bm9wZQ"})
    await admin.refused("GET", f"{V1}/runs", 422, params={"limit": 201})
    await admin.refused("GET", f"{V1}/runs", 422, params={"state": "lost"})


async def test_tasks_show_their_attempts_result_log_and_why(admin: Client, conn: AsyncConnection, etl: int) -> None:
    run_id = await start(conn, "etl")
    path = f"{V1}/runs/{run_id}/tasks"
    why = await admin.ok("GET", f"{path}/load/why")
    assert (why["state"], why["reasons"][0]["kind"], why["upstream"]["task"]) == ("waiting", "upstream", "extract")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    key = TaskKey(run_id, claim.idx, claim.map_index)
    text = "1700000000000000 INFO hello\n1700000001000000 ERROR oops\n"
    chunk = NewChunk(key=key, epoch=claim.epoch, seq=0, until=len(text), content=text)
    await logs.append(conn, session=runner.session, chunks=[chunk])
    await runner.finish(claim, result={"$evertick": "outputs", "value": {"n": 3, "x": 1}, "named": {"rows": 7}})
    listed = await everything(admin, path, limit=1)
    assert [(task["task"], task["state"]) for task in listed] == [("extract", "success"), ("load", "available")]
    assert [task["task"] for task in await everything(admin, path, state="available")] == ["load"]
    shown = await admin.ok("GET", f"{path}/extract")
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["success"]
    assert (shown["result"], shown["outputs"]) == ({"n": 3, "x": 1}, {"rows": 7})
    lines = await everything(admin, f"{path}/extract/logs")
    assert [(line["level"], line["text"]) for line in lines] == [("INFO", "hello"), ("ERROR", "oops")]
    plain = await admin.get(f"{path}/extract/logs.txt", params={"follow": "true"})
    assert plain.text.splitlines()[1].endswith("ERROR oops") and plain.headers["content-type"].startswith("text/plain")
    await admin.refused("GET", f"{path}/none", 404)
    await admin.refused("GET", f"{path}/extract", 404, params={"map_index": 3})


async def test_tasks_are_cleared_with_a_look_before_and_marked(admin: Client, conn: AsyncConnection, etl: int) -> None:
    run_id = await start(conn, "etl")
    await (await Runner.join(conn)).drain({"extract": "failed"})
    path = f"{V1}/runs/{run_id}"
    preview = await admin.ok("POST", f"{path}/clear", json={"only_failed": True, "is_preview": True})
    assert [task["task"] for task in preview["tasks"]] == ["extract", "load"] and preview["reopened"] == 0
    assert await run_state(conn, run_id) == "failed"
    await admin.refused("POST", f"{path}/clear", 404, json={"tasks": ["lod"]})
    done = await admin.ok("POST", f"{path}/clear", json={"only_failed": True})
    assert done["reopened"] == 2 and (await states(conn, run_id))["extract"] == "available"
    assert await admin.ok("POST", f"{path}/tasks/extract/mark", json={"state": "success"}) == {"outcome": "marked"}
    assert (await states(conn, run_id)) == {"extract": "success", "load": "available"}
    await admin.refused("POST", f"{path}/tasks/extract/mark", 409, json={"state": "success"})
    await admin.refused("POST", f"{path}/tasks/extract/mark", 400, json={"state": "running"})


@pytest.mark.requirement("I1", "M1", "R1")
async def test_schedules_change_by_compare_and_set(admin: Client, conn: AsyncConnection, etl: int) -> None:
    path = f"{V1}/dags/etl/schedules"
    answer = await admin.get(f"{path}/main")
    assert answer.headers["etag"] == '"v1"' and answer.json()["origin"] == "code"
    wanted = {"when": "30 6 * * *", "timezone": "Europe/Berlin", "params": {"rows": 7}}
    changed = await admin.put(f"{path}/main", json=wanted, headers={"If-Match": '"v1"'})
    assert (changed.status_code, changed.headers["etag"], changed.json()["params"]) == (200, '"v2"', {"rows": 7})
    stale = await admin.refused("PUT", f"{path}/main", 412, json=wanted, headers={"If-Match": '"v1"'})
    assert stale["code"] == "stale" and "version 2" in stale["detail"]
    await admin.refused("PUT", f"{path}/main", 412, json=wanted, headers={"If-Match": '"v0"'})
    await admin.ok("PUT", f"{path}/new", status=201, json={"when": "@daily"}, headers={"If-Match": '"v0"'})
    assert [each["name"] for each in (await admin.ok("GET", path))["items"]] == ["main", "new"]
    fires = (await admin.ok("GET", f"{path}/main/next", params={"limit": 3}))["fires"]
    assert len(fires) == 3 and fires == sorted(fires)
    assert (await admin.ok("POST", f"{path}/main/pause"))["is_paused_directly"] is True
    assert (await admin.ok("GET", f"{path}/main/next"))["fires"] == []
    assert (await admin.ok("POST", f"{path}/main/unpause"))["is_paused_directly"] is False
    history = (await admin.ok("GET", f"{path}/main/history"))["items"]
    assert [(each["version"], each["changed_by"]) for each in history][:2] == [(4, "user:root"), (3, "user:root")]
    assert await admin.ok("POST", f"{path}/main/reset") == {"is_declared": True}
    assert (await admin.ok("GET", f"{path}/main"))["origin"] == "code"
    await admin.ok("DELETE", f"{path}/new", status=204)
    await admin.refused("GET", f"{path}/new", 404)
    for bad in ({"when": "61 * * * *"}, {"when": "@daily", "timezone": "Mars"}, {"when": {}}, {"when": []}):
        await admin.refused("PUT", f"{path}/main", 400, json=bad)
    await admin.refused("PUT", f"{path}/main", 422, json={"when": "@daily", "nonsense": 1})


async def test_an_expression_is_simulated_across_a_change_of_the_clock(admin: Client) -> None:
    wanted = {"when": "30 2 * * *", "timezone": "Europe/Berlin", "first": "2025-03-29T00:00:00Z"}
    found = await admin.ok("POST", f"{V1}/schedules/simulate", json={**wanted, "last": "2025-03-31T00:00:00Z"})
    assert found["fires"] == ["2025-03-29T01:30:00Z", "2025-03-30T01:00:00Z"]
    assert [each["effect"] for each in found["clock_changes"]] == ["runs_after"]
    await admin.refused("POST", f"{V1}/schedules/simulate", 400, json={**wanted, "last": "2099-01-01T00:00:00Z"})
    await admin.refused("POST", f"{V1}/schedules/simulate", 400, json={**wanted, "last": "2025-03-31T00:00:00"})


async def test_backfills_are_foreseen_made_once_paused_and_canceled(
    admin: Client, conn: AsyncConnection, etl: int
) -> None:
    wanted = {"dag": "etl", "when": "@daily", "first": "2025-01-01T00:00:00Z", "last": "2025-01-05T00:00:00Z"}
    preview = await admin.ok("POST", f"{V1}/backfills", json={**wanted, "is_preview": True})
    assert (preview["total"], preview["new_runs"], preview["backfill_id"]) == (5, 5, None)
    assert (await admin.ok("GET", f"{V1}/backfills"))["items"] == []
    key = {"Idempotency-Key": "b1"}
    made = await admin.ok("POST", f"{V1}/backfills", status=201, json=wanted, headers=key)
    again = await admin.ok("POST", f"{V1}/backfills", json=wanted, headers=key)
    assert again["backfill_id"] == made["backfill_id"] and not again["is_new"]
    path = f"{V1}/backfills/{made['backfill_id']}"
    assert (await admin.ok("POST", f"{path}/pause"))["state"] == "paused"
    assert (await admin.ok("POST", f"{path}/unpause"))["state"] == "running"
    await admin.refused("POST", f"{path}/unpause", 409)
    assert (await admin.ok("POST", f"{path}/cancel"))["state"] == "canceled"
    await admin.refused("POST", f"{path}/cancel", 409)
    assert [each["created_by"] for each in (await admin.ok("GET", f"{V1}/backfills"))["items"]] == ["user:root"]
    assert (await admin.ok("GET", f"{V1}/backfills", params={"dag": "other"}))["items"] == []
    await admin.refused("POST", f"{V1}/backfills", 400, json={**wanted, "last": "2024-01-01T00:00:00Z"})


async def test_pools_and_keys_tell_who_holds_and_who_waits(admin: Client, conn: AsyncConnection) -> None:
    assert (await admin.ok("PUT", f"{V1}/pools/db", status=201, json={"slots": 1}))["slots"] == 1
    needs_pool = (GateSpec(kind=GateKind.POOL, name="db"),)
    await put(conn, make_dag("etl", {"t": []}, task_gates=needs_pool, max_active_tasks=5))
    first, second = await start(conn, "etl"), await start(conn, "etl")
    page = await admin.ok("GET", f"{V1}/pools/db")
    assert ([each["run_id"] for each in page["held_by"]], [each["run_id"] for each in page["waiting"]]) == (
        [first],
        [second],
    )
    assert [each["kind"] for each in (await admin.ok("GET", f"{V1}/keys"))["items"]] == ["dag"]
    assert [each["name"] for each in (await admin.ok("GET", f"{V1}/blocked"))["items"]][:1] != []
    read = (await admin.get(f"{V1}/pools/db")).headers["etag"]
    await set_pool(conn, name="db", slots=3, actor=Actor("test"))
    await admin.refused("PUT", f"{V1}/pools/db", 412, json={"slots": 4}, headers={"If-Match": read})
    read = (await admin.get(f"{V1}/pools/db")).headers["etag"]
    await admin.ok("PUT", f"{V1}/pools/db", json={"slots": 4}, headers={"If-Match": read})
    await admin.refused("DELETE", f"{V1}/pools/db", 409)
    await admin.refused("PUT", f"{V1}/pools/a%2Fb", 404, json={"slots": 1})
    await admin.refused("PUT", f"{V1}/pools/x", 422, json={"slots": -1})
    await admin.ok("PUT", f"{V1}/pools/x", status=201, json={"slots": 1})
    await admin.ok("DELETE", f"{V1}/pools/x", status=204)


async def test_runners_are_drained_and_queues_and_health_tell_what_is_there(
    admin: Client, conn: AsyncConnection, etl: int
) -> None:
    runner = await Runner.join(conn)
    await start(conn, "etl")
    (listed,) = (await admin.ok("GET", f"{V1}/runners"))["items"]
    assert (listed["runner_id"], listed["slots"], listed["request"]) == (f"r{runner.session}", 100, None)
    (queue,) = (await admin.ok("GET", f"{V1}/queues"))["items"]
    assert (queue["queue"], queue["depth"], queue["runners"]) == ("default", 1, 1)
    await admin.ok("POST", f"{V1}/runners/{listed['runner_id']}/drain")
    assert (await admin.ok("GET", f"{V1}/runners"))["items"][0]["request"] == "drain"
    assert len((await admin.ok("POST", f"{V1}/runners/{listed['session']}/undrain"))["runners"]) == 1
    await admin.refused("POST", f"{V1}/runners/none/drain", 404)
    both = {"runners": [listed["runner_id"], listed["session"]]}
    assert len((await admin.ok("POST", f"{V1}/runners/drain", json={**both, "then_leave": True}))["runners"]) == 1
    assert (await admin.ok("GET", f"{V1}/runners"))["items"][0]["request"] == "leave"
    assert len((await admin.ok("POST", f"{V1}/runners/undrain", json={"is_all": True}))["runners"]) == 1
    for unclear in ({}, {**both, "is_all": True}):
        await admin.refused("POST", f"{V1}/runners/drain", 400, json=unclear)
    await admin.refused("POST", f"{V1}/runners/undrain", 422, json={**both, "then_leave": True})
    health = await admin.ok("GET", f"{V1}/health")
    assert (health["scheduler"], health["runners"], health["slots"]) == ("unhealthy", 1, 100)


async def test_who_is_limited_to_tags_sees_nothing_else_anywhere(
    signed: Signed, conn: AsyncConnection, etl: int
) -> None:
    await put(conn, make_dag("secret", {"t": []}, every="@every 1h", tags=("hr",)))
    await put(conn, make_dag("untagged", {"t": []}))
    await put(conn, make_dag("unseen_dag", {"t": []}, tags=("daily",)))
    mine, other = await start(conn, "etl"), await start(conn, "secret")
    limited = await signed(Role.ADMIN, ["finance"])
    assert [dag["name"] for dag in await everything(limited, f"{V1}/dags")] == ["etl"]
    assert await everything(limited, f"{V1}/dags", tag="hr") == []
    assert [dag["name"] for dag in await everything(limited, f"{V1}/dags", tag="daily")] == ["etl"]
    for sort in ("", "newest"):
        shown = (await limited.get("/dags", params={"tag": "daily", "sort": sort})).text
        assert '"/dags/etl"' in shown and "unseen_dag" not in shown
    assert [run["run_id"] for run in await everything(limited, f"{V1}/runs")] == [mine]
    missing = await limited.refused("GET", f"{V1}/runs/{other + 100}", 404)
    for method, path in (
        ("GET", f"/runs/{other}"),
        ("GET", f"/runs/{other}/wait"),
        ("GET", f"/runs/{other}/tasks"),
        ("GET", f"/runs/{other}/tasks/t"),
        ("GET", f"/runs/{other}/tasks/t/logs"),
        ("GET", f"/runs/{other}/tasks/t/logs.txt"),
        ("GET", f"/runs/{other}/tasks/t/why"),
        ("POST", f"/runs/{other}/cancel"),
        ("POST", "/dags/secret/pause"),
        ("DELETE", "/dags/secret"),
        ("GET", "/dags/secret"),
        ("GET", "/dags/untagged"),
        ("GET", "/dags/secret/schedules"),
        ("GET", "/dags/secret/schedules/main"),
        ("GET", "/dags/secret/versions"),
    ):
        told = await limited.refused(method, V1 + path, 404)
        assert told.keys() == missing.keys() and "hr" not in told["detail"], path
    for path, body in (
        (f"/runs/{other}/clear", {}),
        (f"/runs/{other}/tasks/t/mark", {"state": "failed"}),
        ("/dags/secret/runs", {}),
        ("/backfills", {"dag": "secret", "first": "2025-01-01T00:00:00Z", "when": "@daily"}),
    ):
        await limited.refused("POST", V1 + path, 404, json=body)
    assert await run_state(conn, other) == "running"


async def test_users_and_tokens_are_managed_and_no_token_makes_a_stronger_one(
    admin: Client, app: Any, signed: Signed, conn: AsyncConnection
) -> None:
    await admin.ok("POST", f"{V1}/users", status=201, json={"name": "ci", "role": "operator"})
    await admin.refused("POST", f"{V1}/users", 409, json={"name": "CI"})
    assert [user["name"] for user in await everything(admin, f"{V1}/users", limit=1)] == ["ci", "root"]
    wanted = {"name": "deploys", "user": "ci", "role": "admin", "days": 1}
    made = await admin.ok("POST", f"{V1}/tokens", status=201, json=wanted)
    ci = Client(app, made["token"])
    assert (await ci.ok("GET", "/auth/session"))["role"] == "operator", "a token takes away, and never adds"
    await ci.refused("POST", f"{V1}/tokens", 403, json={"name": "more"})
    await ci.refused("POST", f"{V1}/tokens", 403, json={"name": "more", "user": "root"})
    session = await signed(Role.EDITOR, ["finance"], kind="session", limits=(Role.VIEWER, None))
    weak = await session.ok("POST", f"{V1}/tokens", status=201, json={"name": "mine", "role": "admin"})
    seen = await Client(app, weak["token"]).ok("GET", "/auth/session")
    assert (seen["role"], seen["tags"]) == ("viewer", ["finance"])
    assert {each["name"] for each in await everything(session, f"{V1}/tokens")} == {"mine", "test"}
    await session.refused("DELETE", f"{V1}/tokens/{made['token_id']}", 404)
    await admin.ok("PATCH", f"{V1}/users/ci", json={"is_disabled": True})
    await ci.refused("GET", "/auth/session", 401)
    await admin.refused("PATCH", f"{V1}/users/root", 409, json={"role": "viewer"})
    await admin.ok("DELETE", f"{V1}/tokens/{weak['token_id']}", status=204)
    await Client(app, weak["token"]).refused("GET", "/auth/session", 401)


async def test_every_change_is_on_record_with_who_when_and_from_where(
    admin: Client, conn: AsyncConnection, etl: int
) -> None:
    secret = "canary-password-1"
    await admin.ok("POST", f"{V1}/users", status=201, json={"name": "ann", "password": secret})
    await admin.ok("PATCH", f"{V1}/users/ann", json={"role": "editor"}, headers={"X-Request-Id": "req-7"})
    made = await admin.ok("POST", f"{V1}/dags/etl/runs", status=201, json={})
    await admin.ok("POST", f"{V1}/runs/{made['run_id']}/tasks/extract/mark", json={"state": "skipped"})
    await admin.ok("POST", f"{V1}/dags/etl/pause")
    entries = await everything(admin, f"{V1}/audit", limit=2)
    assert [each["entry_id"] for each in entries] == sorted((each["entry_id"] for each in entries), reverse=True)
    mine = {each["verb"]: each for each in entries if each["actor"] == "user:root"}
    assert {"add_user", "change_user", "trigger", "mark", "pause"} <= mine.keys()
    assert {each["origin"] for each in mine.values()} == {"10.0.0.1"}
    change = mine["change_user"]
    assert change["request_id"] == "req-7"
    assert (change["detail"]["before"]["role"], change["detail"]["after"]["role"]) == ("viewer", "editor")
    assert (mine["mark"]["run_id"], mine["mark"]["task"]) == (made["run_id"], "extract")
    assert secret not in str(entries)
    only = await everything(admin, f"{V1}/audit", verb="trigger", actor="user:root", dag="etl")
    assert [each["run_id"] for each in only] == [made["run_id"]]
    assert await everything(admin, f"{V1}/audit", dag="other") == []
    assert await value(conn, "select count(*) from audit_log where origin is null and actor = 'user:root'") == 0


async def test_a_key_of_a_schedule_is_refused_with_another_schedule(admin: Client, etl: int) -> None:
    path, key = f"{V1}/dags/etl/schedules/keyed", {"Idempotency-Key": "s1"}
    first = await admin.ok("PUT", path, status=201, json={"when": "0 8 * * *"}, headers=key)
    assert await admin.ok("PUT", path, json={"when": "0 8 * * *"}, headers=key) == first
    await admin.refused("PUT", path, 409, json={"when": "0 9 * * *"}, headers=key)
    changed = await admin.ok("PUT", path, json={"when": "0 9 * * *"}, headers={"Idempotency-Key": "s2"})
    assert changed["version"] == first["version"] + 1
