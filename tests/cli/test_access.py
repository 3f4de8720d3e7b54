"""`evertick users`, `evertick tokens`, `evertick audit`, and `evertick api` itself."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.engine import accounts
from evertick.observability.health_endpoint import leave_note
from evertick.runtime.listen_socket import API_NOTES
from tests.cli.conftest import Cli, run_program
from tests.engine.world import make_dag, put


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    monkeypatch.setattr("getpass.getpass", lambda *_, **__: lines[0])


async def test_users_are_added_changed_listed_and_disabled(
    cli: Cli, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No users yet" in (await cli("users", "list")).out
    type_in(monkeypatch, "correct horse", "correct horse")
    assert (await cli("users", "add", "ann", "--role", "admin")).out.startswith("Added user ann (admin).")
    assert (await cli("users", "add", "ci", "--role", "operator", "--no-password")).status == 0
    listed = {each["name"]: each for each in (await cli.json("users", "list"))["users"]}
    assert (listed["ann"]["has_password"], listed["ci"]["has_password"]) == (True, False)
    assert "password_hash" not in listed["ann"]
    assert (await cli("users", "set", "ci", "--role", "viewer", "--tag", "finance")).status == 0
    row = await accounts.find_user(conn, "ci")
    assert (row.role, row.tags) == ("viewer", ["finance"])
    assert (await cli("users", "set", "ci", "--all-dags")).status == 0
    assert (await accounts.find_user(conn, "ci")).tags is None
    assert "finance" not in (await cli("users", "list")).out
    assert "is the last admin" in await cli.refused("users", "set", "ann", "--disable", status=1)
    assert "User 'CI' already exists" in await cli.refused("users", "add", "CI", "--no-password", status=1)
    assert "There is no user 'bob'" in await cli.refused("users", "password", "bob")
    assert "Nothing to change" in await cli.refused("users", "set", "ci")
    assert (await cli("users", "password", "ci")).out.startswith("Set the password of ci.")
    assert (await accounts.find_user(conn, "ci")).password_hash is not None
    found = (await cli("users", "link", "ci")).out
    assert found.startswith("/auth/link/evl_") and "At the API's address: http://127.0.0.1:8080/auth/link/" in found
    # An API of this home has another port than the configured one.
    leave_note(Path(".evertick"), "up", "http://0.0.0.0:8181", API_NOTES)
    assert "At the API's address: http://127.0.0.1:8181/auth/link/evl_" in (await cli("users", "link", "ci")).out
    monkeypatch.setenv("EVERTICK_PUBLIC_URL", "https://jobs.example.com/")
    assert "https://jobs.example.com/auth/link/evl_" in (await cli("users", "link", "ci")).out


async def test_a_password_is_one_line_of_a_pipe(
    cli: Cli, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for command, text in (("add", "correct horse\n"), ("password", "battery staple")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        ran = await cli("users", command, "ann")
        assert (ran.status, ran.err) == (0, ""), ran
    assert not [each for each in recwarn if "getpass" in str(each.category).lower()]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "standard input is empty" in await cli.refused("users", "password", "ann")


async def test_a_token_is_shown_once_listed_and_revoked(cli: Cli, conn: AsyncConnection) -> None:
    await cli("users", "add", "ci", "--no-password")
    assert "No valid token" in (await cli("tokens", "list")).out
    made = await cli.json("tokens", "create", "ci", "deploys", "--role", "viewer", "--days", "1")
    found = await accounts.authenticate(conn, made["token"])
    assert found is not None and found.principal.name == "ci"
    (listed,) = (await cli.json("tokens", "list", "ci"))["tokens"]
    assert (listed["token_id"], listed["name"], listed["role"]) == (made["token_id"], "deploys", "viewer")
    assert made["token"] not in (await cli("tokens", "list")).out
    assert "up to 3650 days" in await cli.refused("tokens", "create", "ci", "x", "--days", "9999")
    assert (await cli("tokens", "revoke", made["token_id"], "--yes")).out == f"Revoked token {made['token_id']}.\n"
    assert await accounts.authenticate(conn, made["token"]) is None
    assert "There is no token" in await cli.refused("tokens", "revoke", made["token_id"], "--yes")


async def test_the_audit_log_has_what_the_command_line_did(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"t": []}))
    await cli("dags", "trigger", "etl")
    await cli("users", "add", "ci", "--no-password")
    entries = (await cli.json("audit"))["entries"]
    assert [each["verb"] for each in entries][:2] == ["add_user", "trigger"]
    assert all(each["actor"].startswith("cli:") for each in entries[:2])
    (only,) = (await cli.json("audit", "--verb", "trigger", "--dag", "etl"))["entries"]
    assert only["run_id"] is not None
    assert "add_user" in (await cli("audit", "--limit", 1)).out
    assert "No entry of the audit log" in (await cli("audit", "--dag", "none")).out


async def test_an_api_that_strangers_could_reach_without_a_password_does_not_start(cli: Cli) -> None:
    ran = await run_program("api", "--host", "0.0.0.0", "--port", "0")
    assert ran.status == 2 and "Traceback" not in ran.err
    assert "no user has a password yet" in ran.err and "evertick users password" in ran.err
