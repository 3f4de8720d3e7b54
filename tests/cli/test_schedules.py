"""`evertick schedules`: list and next."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put


async def test_without_schedules_the_list_teaches_how_to_give_one(cli: Cli, conn: AsyncConnection) -> None:
    assert "@dag(schedule=" in (await cli("schedules", "list")).out
    await put(conn, make_dag("idle", {"a": []}))
    assert "idle has no schedule" in (await cli("schedules", "list", "idle")).out
    assert "by hand" in (await cli("schedules", "next", "idle")).out
    assert await cli.json("schedules", "list") == {"schedules": []}


async def test_schedules_are_listed_with_where_they_stand(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, every="@every 1h"))
    await put(conn, make_dag("poisoned", {"a": []}, every="@daily"))
    await put(conn, make_dag("stopped", {"a": []}, every="@daily", starts_paused=True))
    await conn.execute("update schedule_state set error = 'cannot be planned' where schedule_id = 2")
    etl, poisoned, stopped = (await cli("schedules", "list")).out.splitlines()[1:]
    assert etl.split()[:6] == ["etl", "main", "on", "every", "hour", "in"]
    assert "cannot be planned" in poisoned
    assert stopped.split()[2] == "paused"
    found = (await cli.json("schedules", "list"))["schedules"]
    assert [(each["dag"], each["is_paused"], each["error"]) for each in found] == [
        ("etl", False, None),
        ("poisoned", False, "cannot be planned"),
        ("stopped", True, None),
    ]
    assert "Did you mean 'etl'?" in await cli.refused("schedules", "list", "elt")


async def test_the_next_fires_of_a_dag_are_told(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, every="@every 1h"))
    out = (await cli("schedules", "next", "etl", "-n", 3)).out
    assert out.count("+00:00  in ") == 3
    (found,) = (await cli.json("schedules", "next", "etl", "-n", 3))["schedules"]
    assert len(found["next_fires"]) == 3
    assert "paused: it fires nothing" in await _paused(cli)


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
