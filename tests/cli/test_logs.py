"""`evertick tasks logs`: what was written, safe to look at, and while it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.client.connect import open_client
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.errors import UserError
from evertick.operations import task_logs
from evertick.operations.paging import encode_cursor
from evertick.operations.task_logs import read_run_log
from evertick.runtime.connections import ReconnectingConnection
from tests.cli.conftest import Cli
from tests.engine.test_waiting import POLL, waiting, woken, world
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


async def _write(runner: Runner, claim: ExchangeRow, *lines: str, seq: int = 0, at: int = 0) -> None:
    content = "".join(f"{MICROS + at} {line}\n" for line in lines)
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
    assert (await cli("tasks", "logs", 1, "extract")).out.endswith("stdout   red done\n")


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


async def test_polls_of_a_sensor_are_one_attempt(cli: Cli, conn: AsyncConnection) -> None:
    _, runner, epoch = await world(conn, waiting(POLL))
    for number in range(2):
        (poll,) = await runner.claim()
        await _write(runner, poll, f"OUT poll {number}", at=number)
        await runner.finish(poll, "deferred")
        await woken(conn, epoch, 60 * number + 60)
    (last,) = await runner.claim()
    await _write(runner, last, "OUT poll 2", at=2)
    await runner.step([(last, "failed", {"reason": "ValueError: no"})])
    out = (await cli("tasks", "logs", 1, "wait")).out.splitlines()
    assert [line.split()[-1] for line in out] == ["0", "1", "2", "no"]


async def test_tracebacks_have_short_paths(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, f'ERROR   File "/srv/home/bundles/{"0a" * 32}/pkg/etl.py", line 7, in load')
    for command in (("tasks", "logs", 1, "extract"), ("runs", "logs", 1)):
        assert (await cli(*command)).out.endswith('  File "pkg/etl.py", line 7, in load\n')


async def test_the_reason_of_a_failure_is_in_the_log(cli: Cli, runner: Runner, conn: AsyncConnection) -> None:
    (claim,) = await runner.claim()
    await runner.step([(claim, "failed", {"reason": "exited with code 1"})])
    for arguments in ((), ("-f",), ("--attempt", 1)):
        out = (await cli("tasks", "logs", 1, "extract", *arguments)).out
        assert out.endswith("evertick failed: exited with code 1\n") and "nothing" not in out
    await conn.execute("update task set finished_at = finished_at - interval '1 minute' where run_id = 1")
    assert (await cli("runs", "logs", 1)).out.endswith("extract evertick failed: exited with code 1\n")
    assert (await cli("runs", "logs", 1, "-f")).out.count("exited with code 1") == 1


async def test_an_ended_task_that_wrote_nothing_is_not_said_to_write_yet(cli: Cli, runner: Runner) -> None:
    (claim,) = await runner.claim()
    await runner.finish(claim)
    assert "extract of run 1 is success and has written nothing." in (await cli("tasks", "logs", 1, "extract")).out


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


# Of a whole run --------------------------------------------------------------------------------------------------------


async def test_the_log_of_a_run_merges_its_tasks_by_time(
    cli: Cli, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(conn, make_dag("wide", {name: [] for name in "abc"}))
    run = await start(conn, "wide")
    runner = await Runner.join(conn)
    assert "Run 1 has written nothing yet." in (await cli("runs", "logs", run)).out
    claims = {"abc"[claim.idx]: claim for claim in await runner.claim(3)}
    for second in range(7):
        name = "abcbaba"[second]
        await _write(runner, claims[name], f"OUT {name}{second}", "OUT more", seq=second, at=second * 1_000_000)
    lines = (await cli("runs", "logs", run)).out.splitlines()
    assert [line.split()[1:] for line in lines[::2]] == [[n, "stdout", f"{n}{i}"] for i, n in enumerate("abcbaba")]
    assert {line.split()[-1] for line in lines[1::2]} == {"more"}
    document = (await cli.json("runs", "logs", run))["lines"]
    assert [line["task"] for line in document] == [name for name in "abcbaba" for _ in range(2)]
    # The same in small pages, with fewer logs open than there are, and through the chunks of each.
    monkeypatch.setattr(task_logs, "MOST_OPEN", 2)
    monkeypatch.setattr(task_logs, "_LINES_PER_RUN_PAGE", 3)
    monkeypatch.setattr(task_logs, "_CHUNKS_PER_RUN_PAGE", 4)
    for claim in claims.values():
        await runner.finish(claim)
    few = (await cli.json("runs", "logs", run))["lines"]
    assert sorted(few, key=str) == sorted(document, key=str), "each line once"
    assert [line for line in few if line["task"] == "b"] == [line for line in document if line["task"] == "b"]
    assert "leave out --follow" in await cli.refused("runs", "logs", run, "-f", "--json")
    assert "There is no run 99" in await cli.refused("runs", "logs", 99)


async def test_following_a_run_shows_new_lines_of_all_tasks_until_it_ends(
    cli: Cli, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    (claim,) = await runner.claim()
    await _write(runner, claim, "OUT first")
    following = asyncio.create_task(cli("runs", "logs", 1, "-f"))
    seen = ""

    def has_first() -> bool:
        nonlocal seen
        seen += capsys.readouterr().out
        return "first" in seen

    await eventually(has_first)
    await _write(runner, claim, "OUT second", seq=1)
    await runner.finish(claim)
    ran = await following
    assert (ran.status, ran.out.split()[-1]) == (0, "second")
    assert "first" not in ran.out, "each line once"


async def test_a_foreign_cursor_of_a_run_log_is_refused(cli: Cli, runner: Runner) -> None:
    def ask(cursor: str) -> None:
        with open_client() as client:
            client.call(read_run_log, run_id=1, cursor=cursor)

    for cursor in ("x", encode_cursor(1, 2, 3, 4, "x"), encode_cursor(0, 0, 0, 0, ",".join(["1.1.1.1.1"] * 51))):
        with pytest.raises(UserError, match="cursor is invalid"):
            await asyncio.to_thread(ask, cursor)
