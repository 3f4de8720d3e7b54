"""`evertick backfills`: made, looked at and steered from the command line."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import backfills, shards
from evertick.engine.backfills import advance
from tests.cli.conftest import Cli
from tests.engine.world import Runner, lead, make_dag, put
from tests.waiting import eventually

MARCH = ("--from", "2025-03-29", "--to", "2025-03-31")


@pytest.fixture
async def etl(conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, every="30 2 * * *"))


async def move(conn: AsyncConnection, kind: str = "success", *, parallel: int = 100) -> None:
    """The leader makes runs, a runner ends them, the leader counts."""
    epoch = await lead(conn)
    await advance(conn, shard=0, epoch=epoch, backfill_id=1)
    runner = await Runner.join(conn)
    for claim in await runner.claim(parallel):
        await runner.finish(claim, kind, no_retry=True)
    await advance(conn, shard=0, epoch=epoch, backfill_id=1)


async def test_a_dry_run_counts_and_shows_the_first(cli: Cli, conn: AsyncConnection, etl: None) -> None:
    out = (await cli("backfills", "create", "etl", *MARCH, "--dry-run")).out
    assert "3 scheduled times, 3 runs to create." in out
    assert "\nUTC\n2025-03-29T02:30:00Z\n" in out, "one column where the zone is UTC"
    samoa = ("--cron", "0 12 * * *", "--tz", "Pacific/Apia", "--from", "2011-12-28", "--to", "2012-01-01")
    out = (await cli("backfills", "create", "etl", *samoa, "--dry-run")).out
    assert "2011-12-29 12:00:00-10:00" in out and "2011-12-29T22:00:00Z" in out
    assert "On the clock of Pacific/Apia, 1 time does not exist: no run is created for it." in out
    found = await cli.json(
        "backfills",
        "create",
        "etl",
        *MARCH,
        "--cron",
        "30 2 * * *",
        "--tz",
        "Europe/Berlin",
        "--newest-first",
        "--dry-run",
    )
    assert found["sample"] == ["2025-03-31T00:30:00Z", "2025-03-30T01:00:00Z", "2025-03-29T01:30:00Z"]
    assert (found["count"], found["new_runs"], found["existing"]) == (3, 3, {})
    assert await backfills.list_newest(conn) == []


async def test_a_backfill_is_made_shown_and_ended(cli: Cli, conn: AsyncConnection, etl: None) -> None:
    assert "No backfill yet" in (await cli("backfills", "list")).out
    made = await cli("backfills", "create", "etl", *MARCH, "--parallel", 2)
    assert "Started backfill 1 of etl: 3 scheduled times." in made.out
    await move(conn, "failed", parallel=1)
    listed = (await cli("backfills", "list", "etl")).out.splitlines()[1]
    assert listed.split()[:3] == ["1", "etl", "running"]
    assert "33 % (1 of 3)" in listed
    page = (await cli("backfills", "show", 1)).out
    assert "2 created" not in page and "3 created: 2 open, 0 succeeded, 1 failed, 0 canceled" in page
    assert "Failed runs: 1." in page
    assert "Remaining" in page
    again = await cli.json("backfills", "create", "etl", *MARCH, "--reprocess", "failed", "--dry-run")
    assert (again["new_runs"], len(again["sample"])) == (1, 1)
    preview = (await cli("backfills", "create", "etl", *MARCH, "--reprocess", "failed", "--dry-run")).out
    assert "1 run to create" in preview and "more" not in preview
    assert "Paused backfill 1" in (await cli("backfills", "pause", 1)).out
    assert "Resumed backfill 1 of etl" in (await cli("backfills", "unpause", 1)).out
    assert "Canceled 2 runs of it." in (await cli("backfills", "cancel", 1)).out
    found = await cli.json("backfills", "show", 1)
    assert (found["state"], found["dag"], found["failed_runs"], found["total"]) == ("canceled", "etl", [1], 3)
    assert "is over (canceled)" in await cli.refused("backfills", "cancel", 1, status=1)


async def test_the_same_key_is_the_same_backfill(cli: Cli, etl: None) -> None:
    first = await cli.json("backfills", "create", "etl", *MARCH, "--key", "march")
    again = await cli.json("backfills", "create", "etl", *MARCH, "--key", "march")
    assert (first["backfill"], first["is_new"], again["backfill"], again["is_new"]) == (1, True, 1, False)
    assert "has this key already" in (await cli("backfills", "create", "etl", *MARCH, "--key", "march")).out


async def test_progress_is_followed_to_the_end(cli: Cli, conn: AsyncConnection, etl: None) -> None:
    await cli("backfills", "create", "etl", *MARCH, "--parallel", 3)
    following = asyncio.ensure_future(cli("backfills", "show", 1, "--follow"))

    async def is_over() -> bool:
        await move(conn)
        row = await backfills.find(conn, 1)
        return row is not None and row.state == "done"

    await eventually(is_over)
    out = (await following).out
    assert "done: 3 of 3, 0 open, 0 failed" in out
    assert "100 % (3 of 3)" in out


async def test_a_bar_is_drawn_on_a_terminal(cli: Cli, conn: AsyncConnection, etl: None, colours) -> None:
    await cli("backfills", "create", "etl", *MARCH, "--parallel", 3)
    await move(conn)
    colours()
    assert "━━━━" in (await cli("backfills", "show", 1, "--follow")).out


async def test_the_estimate_follows_from_what_is_done(cli: Cli, conn: AsyncConnection, etl: None) -> None:
    await cli("backfills", "create", "etl", *MARCH)
    row = await backfills.find(conn, 1)
    assert row is not None
    assert row.remaining_seconds(await shards.read_clock(conn)) is None
    await move(conn)
    row = await backfills.find(conn, 1)
    assert row is not None
    # One of three has ended after 60 seconds, one is open and one is still to be made.
    assert row.remaining_seconds(row.created_at + timedelta(seconds=60)) == 120


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "etl"], "--from"),
        (["create", "elt", *MARCH], "Did you mean 'etl'?"),
        (["create", "etl", "--from", "soon"], "--from 'soon' is not a date"),
        (["create", "etl", "--from", "2025-03-29", "--to", "2999-01-01"], "in the future"),
        (["create", "etl", "--from", "2999-01-01"], "begins at 2999-01-01T00:00:00+00:00, in the future"),
        (["create", "etl", "--from", "2025-03-29", "--to", "2025-03-28"], "swap them"),
        (["create", "etl", "--from", "2025-03-29T03:00", "--to", "2025-03-29T04:00"], "does not fire from"),
        (["create", "etl", *MARCH, "--schedule", "x", "--cron", "@daily"], "give one of them"),
        (["create", "etl", *MARCH, "--schedule", "x"], "It has: main."),
        (["create", "etl", *MARCH, "--tz", "UTC"], "--tz goes with"),
        (["create", "etl", *MARCH, "--cron", "61 * * * *"], "61 is not between"),
        (["create", "etl", *MARCH, "--parallel", "0"], "from 1 to 1000"),
        (["create", "etl", *MARCH, "--params", "{"], "--params is not JSON"),
        (["create", "etl", *MARCH, "--reprocess", "some"], "some"),
        (["show", "7"], "There is no backfill 7"),
        (["show", "seven"], "is not a backfill's number"),
        (["pause", "9999999999"], "There is no backfill"),
        (["list", "elt"], "Did you mean 'etl'?"),
    ],
)
async def test_bad_input_is_refused_clearly(cli: Cli, etl: None, arguments: list[str], words: str) -> None:
    assert words in await cli.refused("backfills", *arguments)


async def test_the_help_of_create_names_only_what_it_has(
    cli_without_database: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = (await cli_without_database("backfills", "create", "--help")).out
    assert "never starts a second backfill" in text and "--param " not in text
