"""`evertick tasks logs`: what was written, safe to look at, and while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.db.queries.tasks import ExchangeRow
from evertick.runtime.connections import ReconnectingConnection
from tests.cli.conftest import Cli
from tests.engine.world import Runner, key_of, lead, make_dag, put, start
from tests.moving import Mover
from tests.s3_server import s3_server
from tests.waiting import eventually

MICROS = 1_900_000_000_123_456


@pytest.fixture
async def runner(conn: AsyncConnection) -> Runner:
    await put(conn, make_dag("etl", {"extract": []}))
    await start(conn, "etl")
    return await Runner.join(conn)


async def _write(runner: Runner, claim: ExchangeRow, *lines: str, seq: int = 0) -> None:
    content = "".join(f"{MICROS} {line}\n" for line in lines)
    chunk = NewChunk(key=key_of(claim), epoch=claim.epoch, seq=seq, until=seq + 1, content=content)
    await logs.append(runner.conn, session=runner.session, chunks=[chunk])


async def test_a_silent_task_says_that_it_wrote_nothing(cli: Cli, runner: Runner) -> None:
    ran = await cli("tasks", "logs", 1, "extract")
    assert (ran.status, "has written nothing yet" in ran.out) == (0, True)
    assert (await cli.json("tasks", "logs", 1, "extract"))["lines"] == []


async def test_lines_are_shown_with_time_level_and_text(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "INFO hello  world", "ERROR oh no")
    first, second = (await cli("tasks", "logs", 1, "extract")).out.splitlines()
    assert first.split(" ", 1)[0] == f"{datetime.fromtimestamp(MICROS // 1_000_000):%H:%M:%S}.123", (
        "as clocks show it here"
    )
    assert first.endswith("INFO     hello  world")
    assert second.endswith("ERROR    oh no")


async def test_programs_get_every_line_as_it_was(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "OUT a\x1b[2Jb")
    (line,) = (await cli.json("tasks", "logs", 1, "extract"))["lines"]
    assert line == {
        "epoch": 1,
        "at": "2030-03-17T17:46:40.123456Z",
        "level": "OUT",
        "text": "a\x1b[2Jb",
        "is_late": False,
    }


async def test_a_pipe_gets_plain_text(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "OUT \x1b[31mred\x1b[0m \x1b]0;owned\x07done")
    assert (await cli("tasks", "logs", 1, "extract")).out.endswith("OUT      red done\n")


async def test_a_terminal_keeps_colours_and_nothing_else(cli: Cli, runner: Runner, colours: Callable[[], None]) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "ERROR \x1b[31mred\x1b[2J \x1b]0;owned\x07done")
    colours()
    out = (await cli("tasks", "logs", 1, "extract")).out
    assert "\x1b[31mERROR" in out
    assert out.endswith("\x1b[31mred done\x1b[0m\n")


async def test_attempts_follow_each_other_and_one_can_be_picked(cli: Cli, runner: Runner) -> None:
    (first,) = await runner.claim()
    await _write(runner, first, "OUT one")
    await runner.finish(first, "lost")
    (second,) = await runner.claim()
    await _write(runner, second, "OUT two")
    out = (await cli("tasks", "logs", 1, "extract")).out.splitlines()
    assert [line.split()[-1] for line in out] == ["one", "---", "two"]
    assert (await cli("tasks", "logs", 1, "extract", "--attempt", 1)).out.split()[-1] == "one"
    assert (await cli("tasks", "logs", 1, "extract", "--attempt", 2)).out.split()[-1] == "two"
    assert "has 2 attempts" in await cli.refused("tasks", "logs", 1, "extract", "--attempt", 3)


async def test_lines_that_came_late_say_so(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    await runner.finish(claim)
    await _write(runner, claim, "OUT after the end")
    assert (await cli("tasks", "logs", 1, "extract")).out.endswith("after the end (late)\n")


async def test_a_long_log_is_read_to_its_end(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    for seq in range(450):
        await _write(runner, claim, f"OUT line {seq}", seq=seq)
    lines = (await cli("tasks", "logs", 1, "extract")).out.splitlines()
    assert [int(line.split()[-1]) for line in lines] == list(range(450))


async def test_following_shows_new_lines_until_the_task_ends(
    cli: Cli, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "OUT first")
    following = asyncio.create_task(cli("tasks", "logs", 1, "extract", "-f"))
    seen = ""

    def has_first() -> bool:
        nonlocal seen
        seen += capsys.readouterr().out
        return "first" in seen

    await eventually(has_first)
    assert not following.done()
    await _write(runner, claim, "OUT second", seq=1)
    await runner.finish(claim)
    ran = await following
    assert ran.status == 0
    assert ran.out.split()[-1] == "second"


async def test_following_goes_on_after_the_connection_was_lost(
    cli: Cli, runner: Runner, conn: AsyncConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "OUT first")
    following = asyncio.create_task(cli("tasks", "logs", 1, "extract", "-f"))
    seen = ""

    def has_first() -> bool:
        nonlocal seen
        seen += capsys.readouterr().out
        return "first" in seen

    await eventually(has_first)
    killed = await conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name like '%read%' and pid <> pg_backend_pid()"
    )
    assert killed.rowcount == 1
    await _write(runner, claim, "OUT second", seq=1)
    await runner.finish(claim)
    ran = await following
    assert ran.status == 0 and "The database does not answer." in ran.err, ran
    assert ran.out.count("second") == 1 and "first" not in ran.out


async def test_following_and_one_document_exclude_each_other(cli: Cli, runner: Runner) -> None:
    assert "leave out --follow" in await cli.refused("tasks", "logs", 1, "extract", "-f", "--json")


async def test_lines_that_are_in_a_storage_are_shown_or_it_is_said_what_is_missing(
    cli: Cli, runner: Runner, conn: AsyncConnection, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path / "s3") as server:
        settings = Settings(**server.settings, log_archive=True, log_archive_after_seconds=0)
        await conn.execute("update run set created_at = created_at - interval '1 hour'")
        link = ReconnectingConnection(database, Purpose.SCHEDULER)
        mover = Mover(conn, settings, link, await lead(conn))
        await mover.write(run_id=1)
        await mover.round()
        await link.close()
        assert await mover.here() == 0
        told = await cli.refused("tasks", "logs", 1, "extract", status=1)
        assert "set EVERTICK_STORAGE" in told
        for name, given in server.settings.items():
            monkeypatch.setenv(f"EVERTICK_{name.upper()}", given)
        for arguments in ((), ("-f",)):
            lines = (await cli("tasks", "logs", 1, "extract", *arguments)).out.splitlines()
            assert len(lines) == 500 and "1.9.49" in lines[-1]
