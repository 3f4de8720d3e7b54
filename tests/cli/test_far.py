"""Commands through a server: the same words and documents as beside the database, and a clear no where that cannot be."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from psycopg import AsyncConnection

from evertick.api.app import make_app
from evertick.api.serving import serve
from evertick.cli import far
from evertick.config import Settings, login_file
from evertick.domain.access import Role
from evertick.domain.attempt import session_text
from evertick.domain.params import ParamSpec, ParamType
from evertick.engine import accounts
from evertick.engine.gates import set_pool
from evertick.services.listening import address_of, bound
from evertick.store import logs
from evertick.store.logs import NewChunk
from tests.cli.conftest import Cli, Ran
from tests.engine.world import Runner, key_of, make_dag, put, run_state, start, states

CHAIN = {"extract": [], "transform": ["extract"], "load": ["transform"]}
# Of the database's inside, or of the moment.
UNEQUAL = {"gate_id", "oldest_wait_seconds", "silent_seconds", "remaining_seconds", "uses_threads"}


@pytest.fixture
async def address(database: str) -> AsyncIterator[str]:
    at: socket.socket = bound("127.0.0.1", 0)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(make_app, Settings(api_rate=0), database, structlog.get_logger(), at, stop))
    yield address_of(at)
    stop.set()
    await serving


@pytest.fixture
async def token(conn: AsyncConnection) -> str:
    await accounts.add_user(conn, name="ann", role=Role.EDITOR, actor="test")
    row = await accounts.find_user(conn, "ann")
    return (await accounts.issue(conn, row, kind="token", name="t", actor="test", seconds=600)).secret


class Both:
    """A command beside the database and the same through a server."""

    def __init__(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, *, database: str, address: str, token: str) -> None:
        self.near_cli, self._patch, self._database, self._address, self._token = (
            cli,
            monkeypatch,
            database,
            address,
            token,
        )

    async def near(self, *arguments: object) -> Ran:
        self._patch.setenv("EVERTICK_DATABASE_URL", self._database)
        self._patch.delenv("EVERTICK_SERVER", raising=False)
        return await self.near_cli(*arguments)

    async def far(self, *arguments: object) -> Ran:
        self._patch.setenv("EVERTICK_DATABASE_URL", "postgresql://127.0.0.1:1/nothing")
        self._patch.setenv("EVERTICK_SERVER", self._address)
        self._patch.setenv("EVERTICK_TOKEN", self._token)
        return await self.near_cli(*arguments)

    async def same(self, *arguments: object) -> Any:
        """What both say, as a document."""
        near, distant = await self.near(*arguments, "--json"), await self.far(*arguments, "--json")
        assert (near.status, distant.status) == (0, 0), (near, distant)
        assert plain(distant.json) == plain(near.json), arguments
        return distant.json


def plain(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: plain(value) for name, value in document.items() if name not in UNEQUAL}
    return [plain(each) for each in document] if isinstance(document, list) else document


@pytest.fixture
def both(cli: Cli, monkeypatch: pytest.MonkeyPatch, database: str, address: str, token: str) -> Both:
    monkeypatch.setattr(far, "PAUSE_SECONDS", 0.05)
    return Both(cli, monkeypatch, database=database, address=address, token=token)


@pytest.fixture
async def failed(conn: AsyncConnection) -> int:
    """A run whose middle task failed, with a log."""
    spec = make_dag(
        "etl",
        CHAIN,
        every="@every 1h",
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
    await set_pool(conn, name="db", slots=3, actor="test")
    await start(conn, "etl")
    await both.near("backfill", "create", "etl", "--from", "2025-03-01", "--to", "2025-03-02")
    for arguments in (
        ("dags", "list"),
        ("dags", "show", "etl"),
        ("backfill", "list", "etl"),
        ("runs", "list"),
        ("runs", "list", "etl", "--state", "failed"),
        ("runs", "list", "--limit", 1),
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
    ):
        assert await both.same(*arguments), arguments
    for arguments in (("tasks", "logs", failed, "extract"), ("runs", "list"), ("tasks", "show", failed, "transform")):
        assert (await both.far(*arguments)).out.split()[:9] == (await both.near(*arguments)).out.split()[:9]
    followed = await both.far("tasks", "logs", failed, "extract", "--follow")
    assert followed.status == 0 and followed.out.count("\n") == 2


async def test_a_run_is_started_watched_cleared_marked_and_canceled_from_afar(
    both: Both, conn: AsyncConnection, failed: int
) -> None:
    started = await both.far("dags", "trigger", "etl", "--param", "rows=5", "--key", "nightly", "--json")
    run = started.json["run"]["run_id"]
    assert started.json["is_new"] and started.json["run"]["params"] == {"rows": 5}
    assert started.json["run"]["triggered_by"] == "user:ann"
    again = await both.far("dags", "trigger", "etl", "--key", "nightly")
    assert f"Run {run} of etl has this key already" in again.out
    waiting = asyncio.create_task(both.far("runs", "watch", run, "--timeout", "20"))
    runner = await Runner.join(conn)
    await runner.drain()
    watched = await waiting
    assert watched.status == 0 and f"Run {run} of etl: success" in watched.out
    shown = await both.far("runs", "clear", failed, "--failed", "--dry-run")
    assert "2 tasks would run again" in shown.out and await run_state(conn, failed) == "failed"
    cleared = await both.far("runs", "clear", failed, "--failed", "--yes")
    assert "Cleared 2 tasks" in cleared.out and await run_state(conn, failed) == "running"
    marked = await both.far("tasks", "mark", failed, "transform", "success")
    assert "Marked transform" in marked.out and (await states(conn, failed))["transform"] == "success"
    canceled = await both.far("runs", "cancel", failed, "--reason", "enough")
    assert f"Canceled run {failed}" in canceled.out and await run_state(conn, failed) == "canceled"
    assert (await both.far("runs", "watch", failed)).status == 3
    refused = await both.far("runs", "cancel", failed)
    assert refused.status == 1 and "already ended" in refused.err


async def test_dags_pools_and_runners_are_changed_from_afar(both: Both, conn: AsyncConnection, failed: int) -> None:
    assert "etl is paused." in (await both.far("dags", "pause", "etl")).out
    assert "etl goes on." in (await both.far("dags", "unpause", "etl")).out
    assert "is paused (version 2)" in (await both.far("schedules", "pause", "etl", "main")).out
    stale = await both.far("schedules", "unpause", "etl", "main", "--expect-version", 1)
    assert stale.status == 1 and "version" in stale.err
    assert "goes on (version 3)" in (await both.far("schedules", "unpause", "etl", "main")).out
    assert "Deleted schedule main" in (await both.far("schedules", "delete", "etl", "main", "--yes")).out
    assert "Made db with 4 slots" in (await both.far("pools", "set", "db", 4)).out
    assert "Deleted pool db" in (await both.far("pools", "delete", "db", "--yes")).out
    assert "Deleted etl." in (await both.far("dags", "delete", "etl", "--yes")).out
    runner = await Runner.join(conn)
    drained = await both.far("runners", "drain", session_text(runner.session), "--wait", "--timeout", "20")
    assert drained.status == 0 and "Nothing runs there any more." in drained.out
    assert "takes work again" in (await both.far("runners", "undrain", session_text(runner.session))).out
    assert "None of them was drained" in (await both.far("runners", "undrain", "--all")).out


async def test_mapped_tasks_are_named_with_their_number() -> None:
    assert [far._map_index(name) for name in ("t", "t[3]", "t[x]", "[3]", "a[1][2]")] == [-1, 3, -1, -1, 2]
    assert [far._plain_name(name) for name in ("t", "t[3]", "t[x]", "a[1][2]")] == ["t", "t", "t[x]", "a[1]"]


async def test_what_is_wrong_is_said_as_beside_the_database(both: Both, failed: int) -> None:
    for arguments, status, words in (
        (("runs", "show", 999), 2, "There is no run 999"),
        (("runs", "list", "nothing"), 2, "There is no DAG 'nothing'"),
        (("tasks", "show", failed, "nothing"), 2, "has no task 'nothing'"),
        (("dags", "trigger", "etl", "--param", "rows=x"), 2, "rows"),
        (("dags", "trigger", "etl", "--params", '{"nope": 1}'), 2, "nope"),
        (("users", "add", "bob", "--no-password"), 2, "does not work through a server"),
        (("db", "status"), 2, "does not work through a server"),
        (("dags", "unpause", "etl", "--dry-run"), 2, "does not work through a server"),
        (("runs", "watch", "etl"), 2, "does not work through a server"),
    ):
        ran = await both.far(*arguments)
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


async def _other_server(answer: bytes) -> tuple[asyncio.Server, str]:
    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "no Evertick server"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\n<html", "no Evertick server"),
        (b"garbage\r\n\r\n", "gave up"),
        (b"", "gave up"),
    ],
)
async def test_a_server_that_is_none_of_ours_gets_no_second_request(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, answer: bytes, words: str
) -> None:
    monkeypatch.setenv("EVERTICK_TOKEN", "evt_canary")
    server, place = await _other_server(answer)
    async with server:
        ran = await cli("--server", place, "runs", "show", "1")
    assert ran.status == 4 and words in ran.err and "canary" not in ran.err


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
    await accounts.add_user(conn, name="bob", role=Role.EDITOR, password="correct horse", actor="test")
    not_yet = await cli("--server", address, "runs", "list")
    assert not_yet.status == 1 and f"evertick login {address}" in not_yet.err
    answers = ["correct horse"]
    monkeypatch.setattr("typer.prompt", lambda *_, **__: answers.pop(0))
    signed = await cli("login", address, "--user", "bob")
    assert signed.status == 0 and "as bob (editor)" in signed.out
    path = login_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept = json.loads(path.read_text())[address]["token"]
    assert kept not in signed.out and "correct horse" not in path.read_text()
    assert (await cli("--server", address, "runs", "list")).status == 0
    path.chmod(0o644)
    assert "chmod 600" in await cli.refused("--server", address, "runs", "list")
    path.chmod(0o600)
    assert (await cli("logout", address)).status == 0
    assert await accounts.who(conn, kept) is None and json.loads(path.read_text()) == {}
    assert "not signed in" in await cli.refused("logout", address)
    answers = [token, "wrong"]
    assert (await cli("login", address, "--token")).status == 0
    assert (await cli("logout", address)).status == 0
    assert await accounts.who(conn, token) is not None
    assert (await cli("login", address, "--user", "bob")).status == 1
    path.write_text("{broken")
    assert "is damaged" in await cli.refused("--server", address, "runs", "list")
