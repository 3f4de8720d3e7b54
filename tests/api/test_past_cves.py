"""What went wrong in others' schedulers: each cause is tried here. Each test names the reports it answers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.api.auth import GuardedRoute
from evertick.config import Settings
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor, Permission, Role
from evertick.engine import accounts
from evertick.sdk.shell_templates import render_shell
from tests.api.applications import parts_of
from tests.api.conftest import Client, Signed
from tests.api.test_doors import Cell, cells, walk
from tests.engine.world import Runner, key_of, make_dag, put, start, value
from tests.source_tree import SOURCE

V1 = "/api/v1"
XSS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "</textarea><svg/onload=1>",
]
PATHS = ["..%2f", "..%252f..%252fetc%252fpasswd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "....//", "%00", "a" * 4096]
SQL = ["';drop table run;--\\$$/*%%", "1\" or 1=1 or ''||(select secret_hash from credential)||'"]
SHELL = ["$(id)", "`id`", ";id", "|id", "&&id", "-rf", "--help", "$IFS", "!x", "x>y"]


@pytest.fixture(autouse=True)
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at what happens here: whoever may watch is told so instead of waiting for ever."""
    monkeypatch.setattr("evertick.api.event_hub.START_SECONDS", 0.01)


@pytest.fixture
async def run(conn: AsyncConnection) -> AsyncIterator[int]:
    await put(conn, make_dag("etl", {"t": []}, tags=("finance",), every="@every 1h"))
    await put(conn, make_dag("unseen_dag", {"t": []}, every="@every 1h"))
    await start(conn, "unseen_dag")
    yield await start(conn, "etl")


def doors(app: FastAPI) -> list[Cell]:
    """Of both APIs and signing in; pages for people have tests of their own."""
    return [cell for cell in cells(app) if cell.path.startswith(("/api/", "/auth/", "/metrics"))]


def reading(app: FastAPI) -> list[str]:
    """Every path that can be read, of both APIs, with `{name}` where a name goes."""
    found = []
    for prefix in ("/api/v1", "/api/v2"):
        for route in walk(parts_of(app)[prefix].routes):
            if isinstance(route, GuardedRoute) and "GET" in (route.methods or ()):
                found.append(prefix + route.path)
    return found


async def test_airflow_2020_13927_2020_17526_nothing_is_open_and_there_is_no_default_secret(
    app: FastAPI, nobody: Client
) -> None:
    for cell in doors(app):
        if cell.permission is not Permission.OPEN:
            assert (await nobody.request(cell.method, cell.path)).status_code == 401, cell
    words = ("secret", "password", "token")
    secret = [
        each for each in fields(Settings) if any(w in each.name for w in words) and not each.name.endswith("_seconds")
    ]
    plain = {each.name: getattr(Settings(), each.name) for each in secret}
    assert {name for name, found in plain.items() if found} == {"secrets_backends"}


@pytest.mark.parametrize("text", SHELL)
async def test_airflow_2022_40127_an_id_is_kept_as_it_is(
    admin: Client, conn: AsyncConnection, run: int, text: str
) -> None:
    made = await admin.ok("POST", f"{V1}/dags/etl/runs", status=201, json={}, headers={"Idempotency-Key": text})
    assert (await admin.ok("GET", f"{V1}/runs/{made['run_id']}"))["key"] == text


@pytest.mark.parametrize("text", SHELL)
def test_airflow_2022_40127_prefect_2026_5366_a_value_in_a_command_stays_a_value(text: str) -> None:
    command, environment = render_shell("printf %s {{ run.key }}", {"run": {"key": text}})
    assert text not in command and text in environment.values()
    ran = subprocess.run(["sh", "-c", command], env={**environment, "PATH": "/usr/bin:/bin"}, capture_output=True)
    assert ran.stdout.decode() == text


@pytest.mark.parametrize("text", XSS)
async def test_airflow_ghsa_52gm_pysec_60_what_users_write_is_never_html(
    app: FastAPI, admin: Client, conn: AsyncConnection, run: int, text: str
) -> None:
    runner = await Runner.join(conn)
    claim = next(each for each in await runner.claim() if each.run_id == run)
    line = NewChunk(key=key_of(claim), epoch=claim.epoch, seq=0, until=1, content=f"{text}\n")
    await logs.append(conn, session=runner.session, chunks=[line])
    await runner.finish(claim, "failed", reason=text)
    for path in (f"/runs/{run}", f"/runs/{run}/tasks/t", f"/runs/{run}/tasks/t/logs", f"/runs/{run}/tasks/t/logs.txt"):
        answer = await admin.get(V1 + path)
        assert answer.status_code == 200 and "html" not in answer.headers["content-type"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    page = await admin.get(f"/auth/link/{quote(text, safe='')}")
    assert text not in page.text


async def test_airflow_2023_40273_2025_57735_2026_82311_2026_86473_no_credential_survives(
    app: FastAPI, admin: Client, signed: Signed, conn: AsyncConnection
) -> None:
    """By each way that ends one; told apart as a number and as a text."""
    for number, end in enumerate(("logout", "revoke", "disable", "password")):
        client = await signed(Role.VIEWER, name=f"user{number}", kind="session")
        found = await accounts.authenticate(conn, client.token or "")
        assert found is not None and (await client.get("/auth/session")).status_code == 200
        match end:
            case "logout":
                await client.ok("POST", "/auth/logout", status=204)
            case "revoke":
                await admin.ok("DELETE", f"{V1}/tokens/{found.principal.credential_id}", status=204)
            case "disable":
                await accounts.change_user(conn, name=f"user{number}", disabled=True, actor=Actor("test"))
            case _:
                await conn.execute(
                    "select change_account(%s, null, null, false, null, 'x', ('test', null, null))", [f"user{number}"]
                )
        cookie = Client(app, None)
        cookie.cookies.set("evertick_session", client.token or "")
        for caller in (client, cookie):
            for path in ("/auth/session", f"{V1}/runs", f"{V1}/events", "/metrics"):
                assert (await caller.get(path)).status_code == 401, (end, path)


def test_airflow_2025_62402_2026_33264_2026_33858_2026_42359_the_server_runs_no_code_of_users() -> None:
    """Nothing in it unpickles, evaluates or imports what users wrote."""
    forbidden = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill|yaml)\b|(?<![.\w])(eval|exec|compile|__import__)\(", re.M
    )
    for layer in ("api", "ui", "engine", "db", "domain"):
        for file in (SOURCE / layer).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            # It evaluates the annotations of its own declarations, when it is imported.
            assert not forbidden.search(text) or file == SOURCE / "db/statements.py", file
    code = "import sys, evertick.api.app; print([m for m in sys.modules if m.startswith('evertick.bundles.loader_process')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


async def test_airflow_2026_33858_unknown_fields_are_refused_by_every_verb(
    app: FastAPI, admin: Client, run: int
) -> None:
    """A PATCH or PUT is checked as a POST is: nobody sets a state or an owner by naming it."""
    document = parts_of(app)["/api/v1"].openapi()
    schemas = document["components"]["schemas"]
    asked = 0
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is None:
                continue
            for name in {each.rsplit("/", 1)[1] for each in references(body)}:
                assert schemas[name].get("additionalProperties") is False, (verb, path, name)
                asked += 1
    assert asked > 10


def references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        return [found for key, each in schema.items() for found in ([each] if key == "$ref" else references(each))]
    return [found for each in schema for found in references(each)] if isinstance(schema, list) else []


async def test_airflow_2025_68438_2025_66388_2022_27949_2024_45784_no_stored_value_is_ever_answered(
    app: FastAPI, admin: Client, conn: AsyncConnection, run: int
) -> None:
    """What is sealed, a password, a token and a key in the settings: in no answer, no error and no audit entry."""
    await conn.execute(
        "insert into stored_value (kind, name, content, key_id, changed_by, changed_at)"
        " values ('secret', 'db', 'canary-sealed', 'k', 'test', clock())"
    )
    await conn.execute("update account set password_hash = 'canary-hash'")
    await admin.request("PUT", "/auth/password", json={"password": ["canary-given"], "canary-name": 1})
    await admin.request("POST", "/auth/token", json={"username": "root", "password": "canary-tried"})
    await admin.request("POST", "/auth/token", content=b"canary-broken{", headers={"Content-Type": "application/json"})
    await admin.request("GET", f"{V1}/runs", headers={"Authorization": "Bearer evt_canary-token"})
    await admin.request("POST", "/auth/link/evl_canary-link")
    for path in reading(app):
        for name in ("etl", str(run)):
            if "/logs" in path or path.endswith(("/wait", "/events")):
                continue
            answer = await admin.get(fill(path, name))
            assert "canary" not in answer.text.replace("/auth/link/evl_canary-link", ""), path


def fill(path: str, name: str) -> str:
    return "/".join(name if part.startswith("{") else part for part in path.split("/"))


async def test_airflow_2026_28779_ghsa_cgx2_windmill_2026_54136_every_list_is_filtered_row_by_row(
    app: FastAPI, signed: Signed, run: int
) -> None:
    """For a user who is limited to tags, and for a token of somebody who is not."""
    for limited in (await signed(Role.ADMIN, ["finance"]), await signed(Role.ADMIN, limits=(None, ["finance"]))):
        shown = 0
        for path in reading(app):
            if "{" in path or path.endswith(("/events", "/openapi.json")):
                continue
            answer = await limited.get(path)
            assert "unseen_dag" not in answer.text, path
            shown += "etl" in answer.text
        assert shown > 3


async def test_windmill_2026_72542_a_narrowed_token_is_narrowed_at_every_door(app: FastAPI, signed: Signed) -> None:
    viewer = await signed(Role.ADMIN, limits=(Role.VIEWER, None))
    for cell in doors(app):
        if cell.method == "GET" or cell.permission in (Permission.OPEN, Permission.OWN):
            continue
        status = (await viewer.request(cell.method, cell.path)).status_code
        is_reading = cell.permission.value.endswith(".read")
        assert (status == 403) is not is_reading, cell


async def test_prefect_2023_6022_another_sites_page_changes_nothing(app: FastAPI, signed: Signed, run: int) -> None:
    session = await signed(Role.ADMIN, kind="session")
    browser = Client(app, None)
    browser.cookies.set("evertick_session", session.token or "")
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers in ({}, {"Origin": "http://evil.test"}, form, {"Sec-Fetch-Site": "cross-site"}):
        for cell in doors(app):
            if cell.method != "GET" and cell.permission is not Permission.OPEN:
                answer = await browser.request(cell.method, cell.path, headers=headers, content=b"a=b")
                assert answer.status_code == 403, (cell, headers)
    for headers in ({"Origin": "http://evil.test"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await browser.get(f"{V1}/events", headers=headers)).status_code == 403
        assert (await browser.get(f"{V1}/runs/{run}/tasks/t/logs?follow=true", headers=headers)).status_code == 403


async def test_prefect_2026_7723_dagu_ghsa_9wmw_streams_go_through_the_door(app: FastAPI, nobody: Client) -> None:
    for part in parts_of(app).values():
        assert not [route for route in walk(part.routes) if "WebSocket" in type(route).__name__]
    for path in (f"{V1}/events", f"{V1}/runs/1/tasks/t/logs?follow=true", f"{V1}/runs/1/tasks/t/logs.txt?follow=true"):
        assert (await nobody.get(path)).status_code == 401


async def test_dagster_2023_51232_2025_51481_windmill_2026_29059_dagu_ghsa_ph8x_no_path_leads_out(
    app: FastAPI, admin: Client, nobody: Client, run: int
) -> None:
    """Paths hold names and numbers, never a place on a disk: what is no name is unknown, however it is written."""
    for path in [path for path in reading(app) if "{" in path]:
        for text in PATHS:
            for caller, allowed in ((admin, (400, 404, 422)), (nobody, (401, 404))):
                answer = await caller.get(fill(path, text))
                # An event may have any name; nothing was sent under this one.
                is_nothing = caller is admin and answer.status_code == 200 and answer.json()["items"] == []
                assert answer.status_code in allowed or is_nothing, (path, text, answer.text)
                assert "root:" not in answer.text


@pytest.mark.parametrize("text", SQL)
async def test_dagster_2026_41490_windmill_2026_23696_no_text_becomes_sql(
    app: FastAPI, admin: Client, conn: AsyncConnection, run: int, text: str
) -> None:
    """As a name, and as every parameter of every list; and where it did, there would be no key to sign with."""
    before = await value(conn, "select count(*) from run")
    for prefix in ("/api/v1", "/api/v2"):
        for path, verbs in parts_of(app)[prefix].openapi()["paths"].items():
            parameters = verbs.get("get", {}).get("parameters", [])
            if path.endswith(("/wait", "/events")) or "/logs" in path:
                continue
            names = [each["name"] for each in parameters if each["in"] == "query"]
            answers = [await admin.get(prefix + fill(path, quote(text, safe="")), params=dict.fromkeys(names, text))]
            answers += [await admin.get(prefix + fill(path, "etl"), params={name: text}) for name in names]
            assert all(answer.status_code < 500 for answer in answers), (path, [each.text for each in answers])
    assert await value(conn, "select count(*) from run") == before
    tables = "select count(*) from information_schema.columns where table_schema = 'evertick' and column_name ~ 'private|signing'"
    assert await value(conn, tables) == 0
