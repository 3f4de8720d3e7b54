"""How commands reach the database, and what they say when they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.db import failover
from evertick.db.migrate import migrations
from evertick.domain.failover import Server
from evertick.supervisor.postgres_home import PostgresDirectory, PostgresDirectoryLock
from tests.cli.conftest import Cli


async def test_without_a_running_evertick_the_way_to_start_it_is_told(cli_without_database: Cli) -> None:
    said = await cli_without_database.refused("runs", "list", status=4)
    assert "Evertick is not running in ./.evertick; start it with `evertick up`" in said


async def test_the_home_is_the_one_of_the_settings(
    cli_without_database: Cli, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_HOME", str(nowhere / "elsewhere"))
    said = await cli_without_database.refused("runs", "list", status=4)
    assert f"not running in {nowhere / 'elsewhere'}" in said


async def test_a_home_that_is_just_being_started_asks_for_patience(cli_without_database: Cli, nowhere: Path) -> None:
    home = PostgresDirectory(nowhere / ".evertick")
    home.prepare()
    lock = PostgresDirectoryLock(home)
    await lock.acquire()
    try:
        said = await cli_without_database.refused("runs", "list", status=4)
    finally:
        lock.release()
    assert "just starting or stopping" in said


async def test_an_unreachable_database_is_named_without_its_password(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", "postgresql://anna:s3cret@127.0.0.1:1/shop")
    said = await cli.refused("runs", "list", status=4)
    assert "127.0.0.1:1 (database shop)" in said
    assert "EVERTICK_DATABASE_URL" in said
    assert "s3cret" not in said


async def test_a_url_that_cannot_be_read_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", "mysql://anna:s3cret@host/db")
    said = await cli.refused("runs", "list", status=4)
    assert "postgresql://user:password@host" in said
    assert "s3cret" not in said


async def test_an_empty_database_is_migrated_by_one_command(
    cli_without_database: Cli, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = cli_without_database
    monkeypatch.setenv("EVERTICK_DATABASE_URL", empty_database)
    assert "has no Evertick schema yet. Run `evertick db migrate`" in await cli.refused("runs", "list", status=4)
    behind = await cli("db", "status")
    assert behind.status == 1
    assert "0001_baseline" in behind.out
    applied = await cli("db", "migrate")
    assert applied.status == 0
    assert applied.out.count("Applied") == len(migrations()) + 1
    again = await cli("db", "migrate")
    assert "Applied" not in again.out
    assert "up to date" in again.out
    assert (await cli("db", "status")).status == 0
    assert "No runs and no DAGs yet" in (await cli("runs", "list")).out


async def test_the_status_tells_programs_where_the_schema_stands(cli: Cli) -> None:
    found = await cli.json("db", "status")
    assert found["is_current"] is True
    assert found["pending"] == []
    assert found["applied"][0]["migration"] == "0001_baseline"
    assert (found["leader"], found["runners"]) == (None, 0)


@pytest.mark.requirement("N14", "V10")
async def test_the_status_shows_a_failover_and_what_it_cost(cli: Cli, conn: AsyncConnection) -> None:
    first, second = Server(system_id=7, timeline=1), Server(system_id=7, timeline=2)
    mark = await failover.mark(conn, first, actor="test")
    assert mark is not None
    assert "Failover" not in (await cli("db", "status")).out
    await failover.mark(conn, second, actor="test")
    await failover.report_loss(conn, first, lost_until=mark.lsn + 1, actor="test")
    shown = (await cli("db", "status")).out
    assert "to timeline 2 at " in shown
    assert "acknowledged writes of timeline 1 after " in shown
    found = (await cli.json("db", "status"))["timelines"]
    assert [(each["system_id"], each["timeline"]) for each in found] == [("7", 2), ("7", 1)]
    assert found[1]["lost_until"] is not None


async def test_a_newer_schema_is_refused_by_every_command(cli: Cli, conn: AsyncConnection) -> None:
    await be_migrated_further(conn, oldest_program=len(migrations()) + 1)
    for command in (["runs", "list"], ["dags", "pause", "x"], ["db", "status"], ["db", "migrate"]):
        assert "newer than this program" in await cli.refused(*command, status=4)


async def be_migrated_further(conn: AsyncConnection, *, oldest_program: int) -> None:
    """As a later release would leave it."""
    await conn.execute(
        "insert into migration (number, name, checksum, oldest_program) values (%s, 'future', 'x', %s)",
        [len(migrations()) + 1, oldest_program],
    )


@pytest.mark.requirement("N33")
async def test_the_schema_of_the_next_release_is_used_and_shown_as_that(cli: Cli, conn: AsyncConnection) -> None:
    await be_migrated_further(conn, oldest_program=len(migrations()))
    for command in (["runs", "list"], ["db", "migrate"], ["db", "roles"], ["db", "roles", "--keep"]):
        ran = await cli(*command)
        assert ran.status == (4 if command == ["db", "roles"] else 0), ran.err
    shown = await cli("db", "status")
    assert shown.status == 0
    assert "of a later release" in shown.out and "with which this one works" in shown.out
    found = await cli.json("db", "status")
    assert (found["is_current"], found["pending"]) == (True, [])
    assert found["newer"] == [f"{len(migrations()) + 1:04}_future"]


async def test_a_statement_that_postgres_refuses_is_one_line(cli: Cli, conn: AsyncConnection) -> None:
    await conn.execute("alter table run rename to walk")
    assert "rejected the statement" in await cli.refused("runs", "list", status=1)
