"""Commands through a server: the same words and documents as beside the database, and a clear no where that cannot be."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import structlog
from psycopg import AsyncConnection
from typer.main import get_command

from evertick.api.server import serve
from evertick.cli.main import COMMANDS, HERE_ONLY, load_app
from evertick.cli.options import task_instance
from evertick.client.http import HttpClient
from evertick.client.local import user_name
from evertick.config import Settings, login_file
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.db.queries.tasks import TaskRow
from evertick.domain.access import Actor, Role
from evertick.domain.attempt import session_text
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.domain.encryption import new_key
from evertick.domain.schedules.dependencies import Asset, after
from evertick.engine import accounts
from evertick.engine.gates import set_pool
from evertick.runtime.listen_socket import address_of, bound
from tests.api.applications import shared_app
from tests.cli.conftest import Cli, Ran
from tests.cli.test_waiting import asked
from tests.engine.test_after import waiting
from tests.engine.world import (
    Runner,
    hourly_from_half_an_hour_on,
    key_of,
    make_dag,
    put,
    run_state,
    start,
    states,
    value,
)

CHAIN = {"extract": [], "transform": ["extract"], "load": ["transform"]}
KEY = new_key()
# Of the database's inside, or of the moment: also when a token was used last is noted anew after a minute.
UNEQUAL = {"oldest_wait_seconds", "silent_seconds", "remaining_seconds", "used_at", "uses_threads"}


@pytest.fixture
async def address(database: str) -> AsyncIterator[str]:
    at: socket.socket = bound("127.0.0.1", 0)
    stop = asyncio.Event()
    settings = Settings(api_rate_limit=0, secret_keys=(KEY,))
    serving = asyncio.create_task(serve(shared_app, settings, database, structlog.get_logger(), at, stop))
    yield address_of(at)
    stop.set()
    await serving


@pytest.fixture
async def token(conn: AsyncConnection) -> str:
    await accounts.add_user(conn, name="ann", role=Role.EDITOR, actor=Actor("test"))
    row = await accounts.find_user(conn, "ann")
    return (await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=600)).secret


class Both:
    """A command beside the database and the same through a server."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, *, database: str, address: str, token: str) -> None:
        self.near_cli, self._patch, self._database = cli, monkeypatch, database
        self.address, self.token = address, token

    async def local(self, *arguments: object) -> Ran:
        self._patch.setenv("EVERTICK_DATABASE_URL", self._database)
        self._patch.delenv("EVERTICK_SERVER", raising=False)
        return await self.near_cli(*arguments)

    async def remote(self, *arguments: object) -> Ran:
        self._patch.setenv("EVERTICK_DATABASE_URL", "postgresql://127.0.0.1:1/nothing")
        self._patch.setenv("EVERTICK_SERVER", self.address)
        self._patch.setenv("EVERTICK_TOKEN", self.token)
        return await self.near_cli(*arguments)

    async def same(self, *arguments: object) -> Any:
        """What both say, as a document."""
        near, distant = await self.local(*arguments, "--json"), await self.remote(*arguments, "--json")
        assert (near.status, distant.status) == (0, 0), (near, distant)
        assert plain(distant.json) == plain(near.json), arguments
        return distant.json


def beginnings(ran: Ran) -> list[str]:
    """Of the lines of a table: how long ago something was is told by two clocks."""
    return [line[:20] for line in ran.out.splitlines()]


def plain(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: plain(value) for name, value in document.items() if name not in UNEQUAL}
    return [plain(each) for each in document] if isinstance(document, list) else document


@pytest.fixture
def both(cli: Cli, monkeypatch: pytest.MonkeyPatch, database: str, address: str, token: str) -> Both:
    monkeypatch.setattr(HttpClient, "pause_seconds", 0.05)
    return Both(cli, monkeypatch, database=database, address=address, token=token)


@pytest.fixture
async def failed(conn: AsyncConnection) -> int:
    """A run whose middle task failed, with a log."""
    spec = make_dag(
        "etl",
        CHAIN,
        schedules=hourly_from_half_an_hour_on(),
        tags=("finance",),
        description="Loads.",
        params=(ParamSpec(name="rows", type=ParamType.INTEGER, default=10),),
    )
    await put(conn, spec)
    run = await start(conn, "etl")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim(1)
    lines = "1893456000000000 INFO one\n1893456001000000 ERROR two\n"
    chunk = NewChunk(key=key_of(claim), epoch=claim.epoch, seq=0, until=len(lines), content=lines)
    await logs.append(conn, session=runner.session, chunks=[chunk])
    await runner.finish(claim)
    await runner.drain({"transform": "failed"})
    return run


async def test_what_is_shown_is_the_same(both: Both, conn: AsyncConnection, failed: int) -> None:
    await set_pool(conn, name="db", slots=3, actor=Actor("test"))
    await start(conn, "etl")
    await both.local("backfills", "create", "etl", "--from", "2025-03-01", "--to", "2025-03-02")
    for arguments in (
        ("dags", "list"),
        ("dags", "show", "etl"),
        ("backfills", "list", "etl"),
        ("runs", "list"),
        ("runs", "list", "etl", "--state", "failed"),
        ("runs", "list", "--limit", 1),
        ("runs", "list", "--since", "1h", "--until", "2999-01-01", "--kind", "manual", "--contains", "etl"),
        ("runs", "logs", failed),
        ("runs", "show", failed),
        ("tasks", "list", failed),
        ("tasks", "show", failed, "transform"),
        ("tasks", "why", failed + 1, "load"),
        ("tasks", "logs", failed, "extract"),
        ("schedules", "list"),
        ("schedules", "list", "etl"),
        ("pools", "list"),
        ("queues", "list"),
        ("runners", "list"),
        ("shards", "list"),
    ):
        assert await both.same(*arguments), arguments
    for arguments in (("tasks", "logs", failed, "extract"), ("runs", "list"), ("tasks", "show", failed, "transform")):
        assert (await both.remote(*arguments)).out.split()[:9] == (await both.local(*arguments)).out.split()[:9]
    followed = await both.remote("tasks", "logs", failed, "extract", "--follow")
    assert followed.status == 0 and followed.out.count("\n") == 2


async def test_a_run_is_started_watched_cleared_marked_and_canceled_through_a_server(
    both: Both, conn: AsyncConnection, failed: int
) -> None:
    started = await both.remote("dags", "trigger", "etl", "--param", "rows=5", "--key", "nightly", "--json")
    run = started.json["run"]["run_id"]
    assert started.json["is_new"] and started.json["run"]["params"] == {"rows": 5}
    assert started.json["run"]["triggered_by"] == "user:ann"
    again = await both.remote("dags", "trigger", "etl", "--key", "nightly")
    assert f"Run {run} of etl has this key already" in again.out
    waiting = asyncio.create_task(both.remote("runs", "watch", run, "--timeout", "20"))
    runner = await Runner.join(conn)
    await runner.drain()
    watched = await waiting
    assert watched.status == 0 and f"Run {run} of etl: success" in watched.out
    shown = await both.remote("runs", "clear", failed, "--failed", "--dry-run")
    assert "2 tasks would run again" in shown.out and await run_state(conn, failed) == "failed"
    cleared = await both.remote("runs", "clear", failed, "--failed", "--yes")
    assert "Cleared 2 tasks" in cleared.out and await run_state(conn, failed) == "running"
    marked = await both.remote("tasks", "mark", failed, "transform", "success")
    assert "Marked transform" in marked.out and (await states(conn, failed))["transform"] == "success"
    canceled = await both.remote("runs", "cancel", failed, "--reason", "enough")
    assert f"Canceled run {failed}" in canceled.out and await run_state(conn, failed) == "canceled"
    assert (await both.remote("runs", "watch", failed)).status == 3
    refused = await both.remote("runs", "cancel", failed)
    assert refused.status == 1 and "already ended" in refused.err


async def test_dags_pools_and_runners_are_changed_through_a_server(
    both: Both, conn: AsyncConnection, failed: int
) -> None:
    assert "etl is paused." in (await both.remote("dags", "pause", "etl")).out
    dry = ("dags", "unpause", "etl", "--catch-up", "all", "--dry-run")
    await conn.execute("update schedule_state set next_due = next_due - interval '3 hours'")
    assert "3 missed fires would run now" in (await both.remote(*dry)).out
    assert (await both.remote(*dry)).out == (await both.local(*dry)).out
    await conn.execute("update schedule_state set next_due = next_due + interval '3 hours'")
    assert "etl resumed." in (await both.remote("dags", "unpause", "etl")).out
    assert "is paused (version 2)" in (await both.remote("schedules", "pause", "etl", "main")).out
    assert (await both.same("schedules", "unpause", "etl", "main", "--dry-run"))["missed"] == []
    stale = await both.remote("schedules", "unpause", "etl", "main", "--expect-version", 1)
    assert stale.status == 1 and "version" in stale.err
    assert "resumed (version 3)" in (await both.remote("schedules", "unpause", "etl", "main")).out
    assert "Deleted schedule main" in (await both.remote("schedules", "delete", "etl", "main", "--yes")).out
    assert "Created db with 4 slots" in (await both.remote("pools", "set", "db", 4)).out
    assert "Deleted pool db" in (await both.remote("pools", "delete", "db", "--yes")).out
    assert "Deleted etl." in (await both.remote("dags", "delete", "etl", "--yes")).out
    runner = await Runner.join(conn)
    drained = await both.remote("runners", "drain", session_text(runner.session), "--wait", "--timeout", "20")
    assert drained.status == 0 and "All of their attempts have ended." in drained.out
    assert "takes work again" in (await both.remote("runners", "undrain", session_text(runner.session))).out
    assert "None of them was drained" in (await both.remote("runners", "undrain", "--all")).out
    other = await Runner.join(conn)
    missing = await both.remote("runners", "drain", session_text(other.session), "nothing")
    assert missing.status == 2 and "There is no live runner 'nothing'" in missing.err
    assert await value(conn, "select count(*) from runner where request is not null") == 0, "all or none"
    assert (await both.remote("runners", "drain", "--all", "--stop")).out.count("drains, and ends") == 3
    assert (await both.remote("runners", "undrain", "--all")).out.count("takes work again") == 3


async def test_schedules_are_set_reset_and_shown_through_a_server(
    both: Both, conn: AsyncConnection, failed: int
) -> None:
    put_it = (
        "schedules",
        "set",
        "etl",
        "nightly",
        "--cron",
        "30 2 * * *",
        "--tz",
        "Europe/Berlin",
        "--param",
        "rows=7",
    )
    made = await both.remote(*put_it, "--misfire", "skip", "--json")
    assert made.status == 0 and (made.json["version"], made.json["is_new"]) == (1, True), made
    shown = await both.same("schedules", "list", "etl")
    nightly = next(each for each in shown["schedules"] if each["name"] == "nightly")
    assert nightly["params"] == {"rows": 7} and nightly["misfire"] == "skip"
    # What is not said stays, the time zone and the parameters included.
    assert (await both.remote("schedules", "set", "etl", "nightly", "--cron", "0 3 * * *")).status == 0
    shown = await both.same("schedules", "list", "etl")
    nightly = next(each for each in shown["schedules"] if each["name"] == "nightly")
    assert nightly["spec"]["timezone"] == "Europe/Berlin" and nightly["params"] == {"rows": 7}
    stale = await both.remote("schedules", "set", "etl", "nightly", "--cron", "0 4 * * *", "--expect-version", 1)
    assert stale.status == 1 and "version" in stale.err
    await both.local("schedules", "pause", "etl", "nightly")
    for arguments in (
        ("schedules", "next", "etl", "--name", "nightly"),
        ("schedules", "simulate", "etl", "--from", "2025-03-01", "--to", "2025-04-01"),
        ("schedules", "history", "etl", "nightly"),
        ("schedules", "skips"),
        ("schedules", "skips", "etl", "nightly"),
    ):
        assert await both.same(*arguments), arguments
    explained = (await both.remote("schedules", "explain", "etl", "--json")).json["schedules"]
    assert [each["in_words"] for each in explained][1] == "At 03:00 every day, Europe/Berlin time."
    assert "is deleted: the DAG's file" in (await both.remote("schedules", "reset", "etl", "nightly")).out
    await both.local("schedules", "delete", "etl", "main", "--yes")
    assert len((await both.same("schedules", "list", "--deleted"))["schedules"]) == 2
    assert "as the DAG's file declares" in (await both.remote("schedules", "reset", "etl", "main")).out


async def test_backfills_and_versions_are_seen_and_changed_from_afar(
    both: Both, conn: AsyncConnection, failed: int
) -> None:
    stretch = ("backfills", "create", "etl", "--from", "2025-03-01", "--to", "2025-03-02")
    assert (await both.same(*stretch, "--dry-run"))["count"] == 48
    by_rule = (*stretch, "--every", "6h", "--dry-run")
    assert (await both.same(*by_rule))["count"] == 8
    made = await both.remote(*stretch, "--key", "k", "--json")
    number = made.json["backfill"]
    assert made.status == 0 and made.json["is_new"]
    assert "has this key already" in (await both.remote(*stretch, "--key", "k")).out
    assert (await both.same("backfills", "show", number))["total"] == 48
    canceled = await both.remote("backfills", "cancel", number)
    assert "Canceled 0 runs" in canceled.out
    followed = await both.remote("backfills", "show", number, "--follow")
    assert followed.status == 0 and "canceled" in followed.out
    assert (await both.remote("backfills", "cancel", number)).status == 1
    await put(conn, make_dag("etl", {**CHAIN, "check": ["load"]}, every="@every 1h"))
    assert len((await both.same("dags", "versions", "etl"))["versions"]) == 2
    difference = await both.same("dags", "diff", "etl")
    assert (difference["from"], difference["to"]) == (1, 2) and any("check" in each for each in difference["plan"])
    back = await both.remote("dags", "rollback", "etl", "--yes")
    assert back.status == 0 and "is at version 1; it was at 2" in back.out
    assert (await both.remote("dags", "rollback", "etl", 1, "--yes")).status == 1


async def test_gates_values_events_and_approvals_are_listed_and_changed_through_a_server(
    both: Both, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_pool(conn, name="db", slots=1, actor=Actor("test"))
    gates = (GateSpec(kind=GateKind.POOL, name="db"), GateSpec(kind=GateKind.MUTEX, name="table", weight=EXCLUSIVE))
    await put(conn, make_dag("gated", {"a": []}, task_gates=gates))
    for _ in range(2):
        await start(conn, "gated")
    await (await Runner.join(conn)).claim(1)
    for arguments in (("pools", "show", "db"), ("keys", "list"), ("keys", "show", "table"), ("blocked",)):
        assert await both.same(*arguments), arguments
    assert (await both.same("pools", "show", "db", "--limit", 100_000))["pools"][0]["waiting"]
    for way in (both.local, both.remote):
        assert "Did you mean 'table'?" in (await way("keys", "show", "tables")).err
    await put(conn, make_dag("pooled", {"a": []}, task_gates=gates[:1]))
    await start(conn, "pooled")
    assert "1 waiting task can start now." in (await both.remote("pools", "set", "db", 3)).out
    sent = await both.remote("events", "send", "arrived", "--payload", '{"path": "a"}', "--key", "k", "--json")
    assert sent.status == 0 and sent.json["event"]["is_new"] and sent.json["event"]["sent_by"] == "user:ann"
    again = await both.remote("events", "send", "arrived", "--payload", '{"path": "a"}', "--key", "k")
    assert "was sent before" in again.out
    assert (await both.same("events", "list"))["events"][0]["payload"] == {"path": "a"}
    for key in ("", "ü", "a\nb", "k" * 201):
        refused = await both.remote("events", "send", "arrived", "--key", key)
        assert refused.status == 2 and "idempotency-key" in refused.err.lower(), refused
    monkeypatch.setattr(HttpClient, "items_per_page", 1)
    assert "Sent event" in (await both.local("events", "send", "arrived")).out
    for arguments in ((), ("--name", "arrived")):
        assert len((await both.same("events", "list", *arguments))["events"]) == 2
    await put(conn, make_dag("maker", {"a": []}, per_task={"a": {"outlets": ("orders",)}}))
    await put(conn, waiting("taker", after(Asset("orders"), Asset("rates"))))
    assert [each["name"] for each in (await both.same("assets", "list"))["assets"]] == ["orders", "rates"]
    assert (await both.remote("assets", "list")).out == (await both.local("assets", "list")).out
    told = await both.remote("assets", "update", "orders", "--extra", '{"rows": 7}', "--json")
    assert told.status == 0 and told.json["update"]["update_id"] == 1, told
    assert "Recorded an update of rates." in (await both.local("assets", "update", "rates")).out
    assert await value(conn, "select array_agg(updated_by order by update_id) from asset_update") == [
        "user:ann",
        f"cli:{user_name()}",
    ]
    for key, way in (("2030-01-01", both.local), ("2030-01-02", both.remote)):
        assert (await way("assets", "update", "orders", "--partition", key)).status == 0
    listed = (await both.same("assets", "partitions", "orders"))["partitions"]
    assert [each["key"] for each in listed] == ["2030-01-02", "2030-01-01"]
    made = await both.remote("dags", "trigger", "maker", "--partition", "2030-01-01", "--json")
    shown = await both.same("runs", "show", made.json["run"]["run_id"])
    assert shown["partition"]["key"] == "2030-01-01"
    stretch = ("backfills", "create", "maker", "--partition", "2030-01-01", "--partition", "2030-01-02", "--json")
    assert (await both.remote(*stretch, "--dry-run")).json["count"] == 2
    assert (await both.local(*stretch)).status == 0 and (await both.local(*stretch[:3])).status == 2
    for wrong, words in (("nothing", "No DAG updates asset 'nothing'"), ("orders", "not an object")):
        for way in (both.local, both.remote):
            ran = await way("assets", "update", wrong, "--extra", "{}" if wrong == "nothing" else "[]")
            assert ran.status == 2 and words in ran.err, ran
    run = await asked(conn)
    assert (await both.same("approvals", "list"))["approvals"][0]["title"] == "Release?"
    approved = await both.remote("approvals", "approve", run, "ask", "--field", "version=2", "--note", "fine", "--json")
    assert approved.json["approval"]["decided_by"] == "user:ann" and approved.json["approval"]["fields"] == {
        "version": 2
    }
    assert "is required" in (await both.remote("approvals", "approve", await asked(conn), "ask")).err


async def test_stored_values_are_managed_through_a_server_and_secrets_stay_there(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    for kind, text in (("variables", "eu"), ("connections", "postgresql://ann:canary@h/db"), ("secrets", "canary-1")):
        given(text)
        # Through a server no key is needed.
        monkeypatch.delenv("EVERTICK_SECRET_KEYS", raising=False)
        made = await both.remote(kind, "set", "one", "--description", "for tests")
        assert made.status == 0 and "Created" in made.out, made
        monkeypatch.setenv("EVERTICK_SECRET_KEYS", KEY)
        listed = await both.same(kind, "list")
        assert listed[kind][0]["changed_by"] == "user:ann"
        shown = await both.same(kind, "get", "one")
        assert "canary" not in json.dumps(shown)
        assert "Deleted" in (await both.remote(kind, "delete", "one", "--yes")).out
        assert (await both.remote(kind, "get", "one")).status == 2


@pytest.fixture
async def boss(both: Both, conn: AsyncConnection) -> Both:
    """The same, for an admin."""
    await accounts.add_user(conn, name="root", role=Role.ADMIN, actor=Actor("test"))
    row = await accounts.find_user(conn, "root")
    both.token = (await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=600)).secret
    return both


async def test_users_and_tokens_are_managed_and_the_audit_log_is_read_through_a_server(
    boss: Both, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse\nbattery staple\n"))
    added = await boss.remote("users", "add", "bob", "--role", "operator", "--tag", "finance")
    assert added.status == 0 and "Added user bob (operator)." in added.out, added
    assert (await boss.remote("users", "add", "bob", "--no-password")).status == 1, "there is one"
    users = (await boss.same("users", "list"))["users"]
    assert [(each["name"], each["role"], each["has_password"]) for each in users] == [
        ("ann", "editor", False),
        ("bob", "operator", True),
        ("root", "admin", False),
    ]
    assert beginnings(await boss.remote("users", "list")) == beginnings(await boss.local("users", "list"))
    assert "Changed user bob." in (await boss.remote("users", "set", "bob", "--role", "viewer", "--all-dags")).out
    row = await accounts.find_user(conn, "bob")
    assert (row.role, row.tags, row.is_disabled) == ("viewer", None, False)
    before = row.password_hash
    assert "Set the password of bob." in (await boss.remote("users", "password", "bob")).out
    assert (await accounts.find_user(conn, "bob")).password_hash != before
    made = await boss.remote("tokens", "create", "bob", "ci", "--role", "viewer", "--days", 3, "--json")
    known = await accounts.authenticate(conn, made.json["token"])
    assert known is not None and known.principal.name == "bob"
    for arguments in (("tokens", "list"), ("tokens", "list", "bob"), ("tokens", "list", "--limit", 1)):
        assert (await boss.same(*arguments))["tokens"], arguments
    assert beginnings(await boss.remote("tokens", "list")) == beginnings(await boss.local("tokens", "list"))
    assert (
        f"Revoked token {made.json['token_id']}."
        in (await boss.remote("tokens", "revoke", made.json["token_id"], "--yes")).out
    )
    assert await accounts.authenticate(conn, made.json["token"]) is None
    link = await boss.remote("users", "link", "bob")
    path = link.out.split()[0]
    assert path.startswith("/auth/link/") and f"{boss.address}{path}" in link.out.replace("\n", "")
    assert (await boss.remote("users", "link", "root")).status == 1, "a token makes no more of itself"
    await boss.remote("runs", "clear", failed, "--failed", "--yes")
    for arguments in (
        ("audit",),
        ("audit", "--limit", 2),
        ("audit", "--verb", "add_user"),
        ("audit", "--actor", "user:root"),
        ("audit", "--dag", "etl"),
        ("audit", "--run", failed),
    ):
        assert (await boss.same(*arguments))["entries"], arguments
    monkeypatch.setattr("evertick.operations.users.AUDIT_WINDOW", 1)
    (rare,) = (await boss.same("audit", "--verb", "add_token", "--actor", "user:root", "--limit", 1))["entries"]
    assert rare["detail"]["user"] == "bob", "what is rare is found over many short pages"


async def test_alerts_notifications_and_the_quarantine_are_listed_through_a_server(
    both: Both, conn: AsyncConnection, failed: int
) -> None:
    await conn.execute(
        "insert into alert (kind, schedule_id, due_at, last_due_at, raised_at, ended_at)"
        " select k, c.schedule_id, clock(), clock(), clock(), case when k = 'not_fired' then clock() end"
        " from schedule c cross join unnest(array['not_fired', 'not_started', 'not_finished']) k"
    )
    assert len((await both.same("alerts", "list"))["alerts"]) == 2
    for arguments in (("--all",), ("etl", "--all"), ("--all", "--limit", 2)):
        assert (await both.same("alerts", "list", *arguments))["alerts"], arguments
    assert beginnings(await both.remote("alerts", "list")) == beginnings(await both.local("alerts", "list"))
    await conn.execute(
        "insert into quarantine (kind, subject_id, verb, reason, failures, since, failed_at)"
        " select 'run', %s + i, 'reap', 'poison', 3, clock(), clock() from generate_series(0, 2) i",
        [failed],
    )
    assert len((await both.same("quarantine"))["quarantine"]) == 3
    assert (await both.same("quarantine", "--limit", 2))["quarantine"][0]["dag"] == "etl"
    await conn.execute(
        "insert into outbox (shard, sink, event, run_id, payload, created_at, waiting_since, due_at, state, ended_at, response)"
        ' select 0, \'email:a@example.com\', \'failure\', %s, \'{"dag": "etl", "event": "failure"}\', clock(), clock(), clock(),'
        " s, clock(), 'no' from unnest(array['failed', 'sent', 'failed']) s",
        [failed],
    )
    for arguments in ((), ("etl",), ("--state", "sent"), ("--run", failed), ("--sink", "email:a@example.com")):
        assert (await both.same("notifications", "list", *arguments))["notifications"], arguments
    assert (await both.same("notifications", "show", 1))["state"] == "failed"
    again = await both.remote("notifications", "retry", 1)
    assert again.status == 0 and "Notification 1 will be tried again." in again.out
    assert (await both.remote("notifications", "retry", 1)).status == 1, "it waits already"
    assert "1 notification will be tried again." in (await both.remote("notifications", "retry", "--all")).out
    assert (await both.same("notifications", "show", 3))["state"] == "waiting"


async def test_a_dag_is_watched_from_afar(both: Both, failed: int) -> None:
    seen = await both.remote("runs", "watch", "etl", "--timeout", "0.2")
    assert f"run {failed} failed" in seen.out


# Every command with the least that it takes to be called; of what is named there is nothing. A new one needs a line here.
SERVED = """
mcp|dags list|dags show x|dags pause x|dags unpause x|dags delete x --yes|dags trigger x|dags versions x|dags diff x|dags rollback x
runs list|runs show 9|runs logs 9|runs watch 9|runs cancel 9|runs clear 9
tasks list 9|tasks show 9 x|tasks why 9 x|tasks logs 9 x|tasks clear 9 x|tasks mark 9 x success
schedules list|schedules next x|schedules explain x|schedules simulate x|schedules set x y --cron @daily|schedules pause x y
schedules unpause x y|schedules delete x y|schedules reset x y|schedules history x y|schedules skips
backfills create x --from 2025-03-01|backfills list|backfills show 9|backfills pause 9|backfills unpause 9|backfills cancel 9
blocked|shards list|pools list|pools show x|pools set x 3|pools delete x --yes|keys list|keys show x|launchers list|queues list
events send x|events list|assets list|assets partitions x|assets update x|approvals list|approvals approve 9 x|approvals reject 9 x
runners list|runners drain 0000000000000000|runners undrain 0000000000000000|runners token list
guarantees|figures|figures x|forecast|forecast 9
dead-letters list|dead-letters show 9|dead-letters replay 9
webhooks list|webhooks set x --kind github --secret hook --event x|webhooks delete x --yes
checkins list|checkins set x @daily|checkins report x|checkins delete x --yes
state list --asset x|state get k --asset x|state set k 1 --asset x|state delete k --asset x
variables list|variables get x|variables set x|variables delete x --yes|connections list|connections get x|connections set x
connections delete x --yes|secrets list|secrets get x|secrets set x|secrets delete x --yes
audit|alerts list|quarantine|notifications list|notifications show 1|notifications retry 1
users list|users add bob --no-password|users set bob --role viewer|users password bob|users link bob
tokens list|tokens create ann x|tokens revoke 999 --yes
deploy folder|deployments list|deployments show x|deployments diff x|deployments rollback x --yes
deployments delete x --yes
"""
NEAR_ONLY = """
tasks reproduce 9 x|db migrate|db status|db prune|db roles|shards set 2|secrets rotate|notifications test email:a@example.com
"""
# They look at files here, and need no database.
OF_FILES = {"dags validate", "dags test", "tasks test", "routing list", "routing explain"}


async def test_every_command_works_through_a_server_or_says_that_it_does_not(
    both: Both, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nowhere / "folder").mkdir()
    known, named = sorted(leaves(), key=len, reverse=True), set(OF_FILES)
    for text, is_served in ((SERVED, True), (NEAR_ONLY, False)):
        for line in text.replace("\n", "|").strip("|").split("|"):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"postgresql://h/db")))
            named.add(next(each for each in known if f"{line} ".startswith(f"{each} ")))
            ran = await both.remote(*line.split())
            assert ("does not work through a server" not in ran.err) is is_served, (line, ran)
            assert "--help" not in ran.err and ran.status in ((0, 1, 2) if is_served else (2,)), (line, ran)
    for name in HERE_ONLY:
        ran = await both.remote("--server", "http://127.0.0.1:1", name)
        assert (ran.status, "does not work through a server" in ran.err) == (2, True), (name, ran)
    named |= {each for each in known if each.split()[0] in HERE_ONLY}
    assert set(known) == named, "each command is named above, in one of the two lists"


def leaves() -> Iterator[str]:
    """The names of all commands, `runs list` and such."""
    for name, command in COMMANDS.items():
        found = get_command(load_app(command))
        inner = getattr(found, "commands", None)
        yield from [f"{name} {each}" for each in inner] if inner else [name]


async def test_mapped_and_deferred_tasks_are_the_same_through_a_server(both: Both, conn: AsyncConnection) -> None:
    over = Mapping(lists=(MappedList(argument="x", length=3),))
    await put(conn, make_dag("map", {"work": []}, per_task={"work": {"mapping": over}}))
    run = await start(conn, "map")
    runner = await Runner.join(conn)
    claims = await runner.claim()
    await runner.step([(claim, "failed", {}) for claim in claims])
    assert len((await both.same("tasks", "show", run, "work"))["tasks"]) == 3
    (second,) = (await both.same("tasks", "show", run, "work[1]"))["tasks"]
    assert second["map_index"] == 1
    for arguments in (("why", run, "work"), ("why", run, "work[2]"), ("logs", run, "work"), ("logs", run, "work[1]")):
        assert await both.same("tasks", *arguments), arguments
    for way in (both.local, both.remote):
        ran = await way("tasks", "show", run, "work[11]")
        assert ran.status == 2 and "Did you mean 'work[1]'?" in ran.err, ran
    assert "Marked work[1]" in (await both.remote("tasks", "mark", run, "work[1]", "skipped")).out
    assert "Marked work of" in (await both.remote("tasks", "mark", run, "work", "success")).out
    assert await value(conn, "select array_agg(distinct state::text) from task where run_id = %s", run) == ["success"]
    assert "is success already" in (await both.remote("tasks", "mark", run, "work", "success")).err
    waiting_run = await asked(conn)
    reasons = (await both.same("tasks", "why", waiting_run, "ask"))["reasons"]
    assert [(each["kind"], each["wait"]) for each in reasons] == [("deferred", "approval")]
    for way in (both.local, both.remote):
        assert "it waits for an approval, 'Release?'" in (await way("tasks", "why", waiting_run, "ask")).out


async def test_mapped_tasks_are_named_with_their_number() -> None:
    assert [task_instance(name) for name in ("t", "t[3]", "t[x]", "[3]", "a[1][2]", "t[9999999999]")] == [
        ("t", None),
        ("t", 3),
        ("t[x]", None),
        ("[3]", None),
        ("a[1]", 2),
        ("t[9999999999]", None),
    ]


async def test_what_is_wrong_is_said_as_beside_the_database(both: Both, failed: int) -> None:
    for arguments, status, words in (
        (("runs", "show", 999), 2, "There is no run 999"),
        (("runs", "list", "nothing"), 2, "There is no DAG 'nothing'"),
        (("tasks", "show", failed, "nothing"), 2, "has no task 'nothing'"),
        (("dags", "trigger", "etl", "--param", "rows=x"), 2, "rows"),
        (("dags", "trigger", "etl", "--params", '{"nope": 1}'), 2, "nope"),
        (("users", "add", "bob", "--no-password"), 1, "lacks the permission users.manage"),
        (("users", "list"), 1, "lacks the permission users.manage"),
        (("users", "link", "ann"), 1, "lacks the permission users.manage"),
        (("tokens", "list", "bob"), 1, "lacks the permission users.manage"),
        (("tokens", "create", "ann", "x"), 1, "Sign in with a session"),
        (("tokens", "revoke", 999, "--yes"), 2, "999"),
        (("audit",), 1, "lacks the permission audit.read"),
        (("alerts", "list", "nothing"), 2, "There is no DAG 'nothing'"),
        (("notifications", "list", "nothing"), 2, "There is no DAG 'nothing'"),
        (("notifications", "show", 999), 2, "999"),
        (("notifications", "retry", 999), 2, "999"),
        (("db", "status"), 2, "does not work through a server"),
        (("--server", "http://127.0.0.1:1", "up"), 2, "does not work through a server"),
        (("secrets", "get", "token", "--reveal"), 2, "does not show the secret parts"),
        (("keys", "show", "nothing"), 2, "There is no key 'nothing'"),
        (("pools", "show", "nothing"), 2, "There is no pool 'nothing'"),
        (("backfills", "show", 999), 2, "There is no backfill 999"),
        (("schedules", "set", "etl", "new"), 2, "give its times"),
        (("schedules", "set", "etl", "main", "--cron", "x"), 2, "x"),
        (("schedules", "history", "etl", "nothing"), 2, "never had a schedule"),
        (("dags", "diff", "etl", 9), 2, "has no version 9"),
        (("dags", "rollback", "etl"), 2, "has no version before"),
        (("variables", "get", "nothing"), 2, "nothing"),
    ):
        ran = await both.remote(*arguments)
        assert (ran.status, words in ran.err) == (status, True), (arguments, ran)
        assert "Traceback" not in ran.err


async def test_a_server_that_is_wrong_or_away_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, address: str, token: str
) -> None:
    monkeypatch.setenv("EVERTICK_TOKEN", "evt_wrong")
    refused = await cli("--server", address, "runs", "list")
    assert refused.status == 1 and f"evertick login {address}" in refused.err
    monkeypatch.setenv("EVERTICK_TOKEN", token)
    assert (await cli("--server", f"{address}/", "runs", "list")).status == 0
    away = await cli("--server", "http://127.0.0.1:1", "runs", "list")
    assert away.status == 4 and "cannot be reached" in away.err
    for wrong in ("ftp://x", "example.com", "http://ann:secret@host", "http://host:99999", "http://host/?a=1"):
        ran = await cli("--server", wrong, "runs", "list")
        assert ran.status == 2 and "secret" not in ran.err, ran


OLDER, UNKNOWN = "HTTP/1.1 %d %s\r\nContent-Length: %d\r\n\r\n%s", '{"code": "not_found", "detail": "Not Found"}'


async def _other_server(answer: bytes | str) -> tuple[asyncio.Server, str]:
    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer if isinstance(answer, bytes) else answer.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
            "is not an Evertick server",
        ),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n<html", "is not an Evertick server"),
        (
            OLDER % (404, "Not Found", len(UNKNOWN), UNKNOWN),
            "does not know GET /api/v1/runs/1: it runs another version",
        ),
        (OLDER % (200, "OK", 2, "{}"), "has no 'run_id': it runs another version"),
        (b"garbage\r\n\r\n", "gave up"),
        (b"", "gave up"),
    ],
)
async def test_a_server_that_is_none_of_ours_gets_no_second_request(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, answer: bytes | str, words: str
) -> None:
    monkeypatch.setenv("EVERTICK_TOKEN", "evt_canary")
    server, place = await _other_server(answer)
    async with server:
        ran = await cli("--server", place, "runs", "show", "1")
    assert ran.status == 4 and words in ran.err and "canary" not in ran.err


async def test_a_log_that_breaks_off_is_followed_from_where_it_was(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTICK_TOKEN", "evt_x")
    monkeypatch.setattr("evertick.client.connect.RETRY_SECONDS", (0.01,))
    asked_for: list[str] = []
    line = '{"at": null, "level": "OUT", "text": "%s"}'
    lines = 'id: %s\nevent: lines\ndata: {"epoch": 1, "is_late": false, "lines": [%s]}\n\n'
    streams = [
        lines % ("1.0.9", line % "one") + "id: 1.9.",
        ": still here\nid: 1.0.9\n\n",
        "id: 1\nevent: new\ndata: {}\n\n"
        + lines % ("1.9.18", line % "two")
        + 'id: 1.9.18\nevent: end\ndata: {"state": "success"}\n\n',
    ]

    names = [field.name for field in fields(TaskRow)]
    row = dict.fromkeys(names) | dict.fromkeys(names[:9], 1) | {"task": "t", "state": "success", "queue": "default"}
    task = json.dumps({"task": row, "attempts": [], "result": None, "outputs": {}})

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]
        kind, body = "application/json", task
        if "/logs" in path:
            asked_for.append(path)
            kind, body = "text/event-stream", streams[len(asked_for) - 1]
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    async with server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ran = await cli("--server", address, "tasks", "logs", 1, "t[0]", "-f")
    assert ran.status == 0 and [each.split()[-1] for each in ran.out.splitlines()] == ["one", "two"], ran
    path = "/api/v1/runs/1/tasks/t/logs?map_index=0"
    assert asked_for == [f"{path}&follow=true"] + [f"{path}&after=1.0.9&follow=true"] * 2
    assert "The server does not answer." in ran.err


async def test_a_lost_answer_to_a_change_is_told_as_such(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTICK_TOKEN", "evt_x")
    server, place = await _other_server(b"")
    async with server:
        ran = await cli("--server", place, "runs", "cancel", "1")
    assert ran.status == 4 and "not known whether this was done" in ran.err


async def test_signing_in_keeps_a_token_that_only_the_person_can_read(
    cli: Cli, nowhere: Path, monkeypatch: pytest.MonkeyPatch, address: str, token: str, conn: AsyncConnection
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nowhere / "config"))
    await accounts.add_user(conn, name="bob", role=Role.EDITOR, password="correct horse", actor=Actor("test"))
    not_yet = await cli("--server", address, "runs", "list")
    assert not_yet.status == 1 and f"evertick login {address}" in not_yet.err
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse\n"))
    signed = await cli("login", address, "--user", "bob")
    assert signed.status == 0 and "as bob (editor)" in signed.out
    path = login_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept = json.loads(path.read_text())[address]["token"]
    assert kept not in signed.out and "correct horse" not in path.read_text()
    assert (await cli("--server", address, "runs", "list")).status == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse\n"))
    assert (await cli("login", address, "--user", "bob", "--name", "here")).status == 0
    assert (await cli("--server", "here", "runs", "list")).status == 0
    assert "no server named 'there'" in await cli.refused("--server", "there", "runs", "list")
    away = {"user": "bob", "token": "evt_x", "is_session": False, "name": "away"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "http://127.0.0.1:9": away}))
    listed = json.loads((await cli("servers", "--json")).out)["servers"]
    assert [(each["name"], each["error"] is None) for each in listed] == [("away", False), ("here", False)]
    assert (
        listed[1]["runners"] == 0
        and "no scheduler leads" in listed[1]["error"]
        and address in (await cli("servers")).out
    )
    assert "Another server has the name" in await cli.refused("login", address, "--name", "away")
    assert (await cli("logout", "away")).status == 0
    kept = json.loads(path.read_text())[address]["token"]
    path.chmod(0o644)
    assert "chmod 600" in await cli.refused("--server", address, "runs", "list")
    path.chmod(0o600)
    assert (await cli("logout", address)).status == 0
    assert await accounts.authenticate(conn, kept) is None and json.loads(path.read_text()) == {}
    assert "not signed in" in await cli.refused("logout", address)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{token}\nwrong\n"))
    assert (await cli("login", address, "--token")).status == 0
    assert (await cli("logout", address)).status == 0
    assert await accounts.authenticate(conn, token) is not None
    assert (await cli("login", address, "--user", "bob")).status == 1
    path.write_text("{broken")
    assert "is damaged" in await cli.refused("--server", address, "runs", "list")
