"""`evertick schedules`: what there is, when it fires, and changes by users."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from tests.cli.conftest import Cli
from tests.engine.world import hourly_from_half_an_hour_on, make_dag, put


async def test_without_schedules_the_list_teaches_how_to_give_one(cli: Cli, conn: AsyncConnection) -> None:
    assert "@dag(schedule=" in (await cli("schedules", "list")).out
    await put(conn, make_dag("idle", {"a": []}))
    assert "idle has no schedule" in (await cli("schedules", "list", "idle")).out
    assert "Start it with" in (await cli("schedules", "next", "idle")).out
    assert await cli.json("schedules", "list") == {"schedules": []}


async def test_schedules_are_listed_with_where_they_stand(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, schedules=hourly_from_half_an_hour_on()))
    await put(conn, make_dag("poisoned", {"a": []}, every="@daily"))
    await put(conn, make_dag("stopped", {"a": []}, every="@daily", starts_paused=True))
    await conn.execute("update schedule_state set error = 'cannot be planned' where schedule_id = 2")
    etl, poisoned, stopped = (await cli("schedules", "list")).out.splitlines()[1:]
    assert etl.split()[:6] == ["etl", "main", "on", "every", "hour", "in"]
    assert "cannot be planned" in poisoned
    assert stopped.split()[2] == "paused"
    assert "code" in etl.split()
    found = (await cli.json("schedules", "list"))["schedules"]
    assert [(each["dag"], each["is_paused"], each["error"]) for each in found] == [
        ("etl", False, None),
        ("poisoned", False, "cannot be planned"),
        ("stopped", True, None),
    ]
    assert "Did you mean 'etl'?" in await cli.refused("schedules", "list", "elt")


async def test_the_next_fires_of_a_dag_are_told(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, schedules=hourly_from_half_an_hour_on()))
    out = (await cli("schedules", "next", "etl", "-n", 3)).out
    assert out.count("+00:00  in ") == 3
    (found,) = (await cli.json("schedules", "next", "etl", "-n", 3))["schedules"]
    assert len(found["next_fires"]) == 3
    assert "paused: it does not fire" in await _paused(cli)


async def _paused(cli: Cli) -> str:
    await cli("dags", "pause", "etl")
    return (await cli("schedules", "next", "etl")).out


async def test_an_expression_is_tried_without_a_database(cli_without_database: Cli) -> None:
    ran = await cli_without_database(
        "schedules", "next", "--cron", "30 6 * * MON-FRI", "--tz", "Europe/Berlin", "-n", 4
    )
    lines = ran.out.splitlines()
    assert lines[0] == "cron 30 6 * * MON-FRI (Europe/Berlin)"
    assert lines[1].split() == ["Europe/Berlin", "UTC", "WHEN"]
    assert all(" 06:30:00+0" in line for line in lines[2:])
    assert len(lines) == 6
    found = await cli_without_database.json("schedules", "next", "--cron", "@every 90s", "-n", 2)
    assert found["schedule"] == "every 1 minute 30 seconds"
    assert len(found["next_fires"]) == 2


async def test_an_expression_that_has_ended_says_so(cli_without_database: Cli) -> None:
    assert (
        "It has ended" in (await cli_without_database("schedules", "next", "--cron", "@once 2020-01-01T00:00:00Z")).out
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cron", "61 * * * *"], "61 is not between 0 and 59"),
        (["--cron", "* * * * *", "--tz", "Europe/Berln"], "did you mean 'Europe/Berlin'?"),
        ([], "Name a DAG, or give an expression"),
        (["etl", "--cron", "@daily"], "one of them"),
        (["etl", "--tz", "UTC"], "--tz goes with --cron"),
        (["--cron", "@daily", "-n", "0"], "-n"),
    ],
)
async def test_bad_input_is_refused_clearly(cli_without_database: Cli, arguments: list[str], words: str) -> None:
    assert words in await cli_without_database.refused("schedules", "next", *arguments)


# By hand -------------------------------------------------------------------------------------------------------------


async def test_a_schedule_is_put_by_hand_and_shown_as_such(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, every="@every 1h"))
    made = await cli(
        "schedules", "set", "etl", "nightly", "--cron", "30 2 * * *", "--tz", "Europe/Berlin", "--jitter", "5m"
    )
    assert made.status == 0, made.err
    assert "cron 30 2 * * * (Europe/Berlin), up to 5 minutes later (version 1)" in made.out
    changed = await cli.json("schedules", "set", "etl", "nightly", "--overlap", "skip", "--misfire", "all")
    assert (changed["version"], changed["is_new"]) == (2, False)
    assert changed["schedule"] == "cron 30 2 * * * (Europe/Berlin), up to 5 minutes later"
    out = (await cli("schedules", "list")).out
    assert "edited (cli:" in out and "Edited schedules ignore the DAG file" in out
    listed = {each["name"]: each for each in (await cli.json("schedules", "list"))["schedules"]}
    assert (listed["nightly"]["origin"], listed["main"]["origin"]) == ("user", "code")
    assert (listed["nightly"]["overlap"], listed["nightly"]["misfire"]) == ("skip", "all")
    versions = (await cli.json("schedules", "history", "etl", "nightly"))["versions"]
    assert [each["change"] for each in versions] == ["put", "put"]
    assert "overlap=skip" in (await cli("schedules", "history", "etl", "nightly")).out


async def test_a_schedule_is_paused_unpaused_deleted_and_given_back(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, schedules=hourly_from_half_an_hour_on()))
    assert "is paused (version 2)" in (await cli("schedules", "pause", "etl", "main")).out
    assert (await cli.json("schedules", "list"))["schedules"][0]["is_paused_directly"] is True
    await conn.execute("update schedule_state set next_due = next_due - interval '5 hours'")
    out = (await cli("schedules", "unpause", "etl", "main", "--catch-up", "all", "--dry-run")).out
    assert "5 missed fires would run now:" in out
    assert await conn_count(conn, "run") == 0
    out = (await cli("schedules", "unpause", "etl", "main", "--catch-up", "latest")).out
    assert "resumed (version 3)" in out and "4 missed fires skipped" in out and "1 missed fire ran now" in out
    assert await conn_count(conn, "run") == 1
    out = (await cli("schedules", "skips", "etl")).out
    assert "only the latest ran" in out
    (skip,) = (await cli.json("schedules", "skips", "etl", "main"))["skips"]
    assert (skip["count"], skip["reason"]) == (4, "misfire_latest")
    assert "Deleted schedule main" in (await cli("schedules", "delete", "etl", "main", "--yes")).out
    assert "deleted" in (await cli("schedules", "list", "--deleted")).out
    assert "as the DAG's file declares it" in (await cli("schedules", "reset", "etl", "main")).out
    assert (await cli.json("schedules", "list"))["schedules"][0]["origin"] == "code"


async def conn_count(conn: AsyncConnection, what: str) -> object:
    cursor = await conn.execute(f"select count(*) from {what}")  # type: ignore[arg-type]
    row = await cursor.fetchone()
    return row and row[0]


async def test_a_dag_catches_up_when_it_is_unpaused_and_asked_to(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, schedules=hourly_from_half_an_hour_on()))
    await cli("dags", "pause", "etl")
    await conn.execute("update schedule_state set next_due = next_due - interval '3 hours'")
    assert "3 missed fires would run now" in (await cli("dags", "unpause", "etl", "--catch-up", "all", "--dry-run")).out
    assert "would be skipped" in (await cli("dags", "unpause", "etl", "--dry-run")).out
    assert "3 missed fires ran now" in (await cli("dags", "unpause", "etl", "--catch-up", "all")).out
    assert await conn_count(conn, "run") == 3


async def test_a_list_of_instants_that_are_over_never_fires(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}))
    out = (await cli("schedules", "set", "etl", "old", "--at", "2020-01-01T00:00Z", "--at", "2021-01-01T00:00Z")).out
    assert "It never fires: all of its instants are over." in out
    assert "over before the schedule was known" in (await cli("schedules", "skips")).out


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (["set", "etl", "new"], "give its times with --cron EXPR or --at TIME", 2),
        (["set", "etl", "new", "--cron", "@daily", "--at", "2030-01-01"], "one of the two", 2),
        (["set", "etl", "new", "--cron", "0 0 31 2 *"], "never fires", 2),
        (
            ["set", "etl", "new", "--cron", "@daily", "--start", "2031-01-01", "--end", "2030-01-01"],
            "before it starts",
            2,
        ),
        (["set", "etl", "new", "--cron", "@daily", "--tz", "Europe/Berln"], "did you mean 'Europe/Berlin'?", 2),
        (["set", "etl", "new", "--cron", "@daily", "--jitter", "often"], "--jitter 'often'", 2),
        (["set", "etl", "a b", "--cron", "@daily"], "schedule names are not allowed", 2),
        (["set", "etl", "new", "--cron", "@daily", "--param", "x=1"], "x", 2),
        (["set", "etl", "main", "--cron", "@daily", "--expect-version", "7"], "is at version 1, not at 7", 1),
        (["set", "etl", "main", "--cron", "@daily", "--expect-version", "0"], "is at version 1, not at 0", 1),
        (["pause", "etl", "man"], "Did you mean 'main'?", 2),
        (["pause", "elt", "main"], "Did you mean 'etl'?", 2),
        (["unpause", "etl", "main", "--window", "3d"], "add --catch-up latest", 2),
        (["history", "etl", "never"], "never had a schedule 'never'", 2),
        (["skips", "elt"], "Did you mean 'etl'?", 2),
    ],
)
async def test_a_change_that_cannot_be_is_refused_clearly(
    cli: Cli, conn: AsyncConnection, arguments: list[str], words: str, status: int
) -> None:
    await put(conn, make_dag("etl", {"a": []}, every="@every 1h"))
    assert words in await cli.refused("schedules", *arguments, status=status)
