"""`evertick schedules next`, `explain` and `simulate`: saved schedules and expressions, without a server for the latter."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put

HALF_PAST_TWO = ("--cron", "30 2 * * *", "--tz", "Europe/Berlin")
YEAR = ("--from", "2025-01-01", "--to", "2025-12-31")


@pytest.mark.requirement("I7")
async def test_a_year_is_simulated_with_a_calendar_and_its_clock_changes(cli_without_database: Cli) -> None:
    ran = await cli_without_database("schedules", "simulate", *HALF_PAST_TWO, *YEAR, "-n", 3)
    lines = ran.out.splitlines()
    assert lines[1] == "365 fires from 2025-01-01 00:00 to 2025-12-31 23:59"
    (march,) = [line for line in lines if line.startswith("2025-03  ")]
    (october,) = [line for line in lines if line.startswith("2025-10  ")]
    assert march.endswith(" 1 1>1") and march.count("1") == 31
    assert october.endswith("1<1 1 1 1 1")
    assert "02:30 never happens: it fires once right after the gap, at 03:00 (2025-03-30T01:00:00Z)" in ran.out
    assert "02:30 happens twice: it fires at the first, 2025-10-26T00:30:00Z" in ran.out
    assert "and 362 more" in lines[-1]


async def test_a_simulation_is_a_document_for_programs(cli_without_database: Cli) -> None:
    found = await cli_without_database.json("schedules", "simulate", *HALF_PAST_TWO, *YEAR, "-n", 400)
    assert found["count"] == len(found["fires"]) == sum(day["count"] for day in found["days"]) == 365
    assert [(each["at"], each["effect"]) for each in found["clock_changes"]] == [
        ("2025-03-30T01:00:00Z", "runs_after"),
        ("2025-10-26T01:00:00Z", "first_only"),
    ]
    marked = {each["at"]: each["clock_change"] for each in found["fires"] if each["clock_change"]}
    assert marked == {
        "2025-03-30T01:00:00Z": "for 02:30, which never happens",
        "2025-10-26T00:30:00Z": "the first 02:30 of that day",
    }


async def test_a_day_that_never_was_is_seen(cli_without_database: Cli) -> None:
    asked = ("--cron", "0 12 * * *", "--tz", "Pacific/Apia", "--from", "2011-12-29", "--to", "2011-12-31")
    out = (await cli_without_database("schedules", "simulate", *asked)).out
    assert "1 x>1" in out
    assert "2011-12-30 12:00 never happens and is skipped: the gap of 24 hours is longer than 3 hours" in out


async def test_fires_of_every_millisecond_are_counted_and_not_visited(cli_without_database: Cli) -> None:
    found = await cli_without_database.json("schedules", "simulate", "--every", "50ms", *YEAR, "-n", 2)
    assert (found["count"], len(found["fires"])) == (365 * 24 * 3600 * 20, 2)


async def test_an_expression_is_explained(cli_without_database: Cli) -> None:
    out = (await cli_without_database("schedules", "explain", *HALF_PAST_TWO, *YEAR)).out
    assert "At 02:30 every day, Europe/Berlin time." in out
    assert "it fires once right after the gap" in out
    hourly = (
        await cli_without_database("schedules", "explain", "--cron", "@hourly", "--tz", "Europe/Berlin", *YEAR)
    ).out
    assert "02:00 never happens and does not fire: it keeps real time" in hourly
    assert "02:00 happens twice and fires both times" in hourly
    interval = (await cli_without_database("schedules", "explain", "--every", "1h", *YEAR)).out
    assert "Every hour." in interval
    assert "None in UTC" in interval
    found = await cli_without_database.json("schedules", "explain", *HALF_PAST_TWO, *YEAR)
    assert found["in_words"] == "At 02:30 every day, Europe/Berlin time."


async def test_the_next_fires_from_another_time_are_marked(cli_without_database: Cli) -> None:
    asked = ("--cron", "0 * * * *", "--tz", "Europe/Berlin", "--from", "2025-10-26T02:00", "-n", 3)
    out = (await cli_without_database("schedules", "next", *asked)).out
    assert [line.split("ago  ")[-1].strip() for line in out.splitlines()[2:4]] == [
        "the first 02:00 of that day",
        "the second 02:00 of that day",
    ]


async def test_a_saved_schedule_is_simulated_by_what_is_saved(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, every="30 2 * * *"))
    (found,) = (await cli.json("schedules", "simulate", "etl", *YEAR))["schedules"]
    assert (found["name"], found["count"], found["clock_changes"]) == ("main", 365, [])
    (told,) = (await cli.json("schedules", "explain", "etl", "--name", "main", *YEAR))["schedules"]
    assert told["in_words"] == "At 02:30 every day, UTC time."
    assert "365 fires" in (await cli("schedules", "simulate", "etl", *YEAR)).out
    assert "It has: main." in await cli.refused("schedules", "explain", "etl", "--name", "nightly")
    assert "Did you mean 'etl'?" in await cli.refused("schedules", "simulate", "elt")
    await conn.execute("update schedule set spec = '{}'")
    await conn.execute("update schedule_state set error = 'kind None is unknown'")
    for verb in ("next", "explain", "simulate"):
        assert "cannot be read: kind None is unknown" in (await cli("schedules", verb, "etl")).out
        (broken,) = (await cli.json("schedules", verb, "etl"))["schedules"]
        assert (broken["name"], broken["error"]) == ("main", "kind None is unknown")
    await put(conn, make_dag("idle", {"a": []}))
    assert "Start it with" in (await cli("schedules", "simulate", "idle")).out
    assert "Start it with" in (await cli("schedules", "explain", "idle")).out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cron", "61 * * * *"], "61 is not between 0 and 59"),
        (["--cron", "@daily", "--tz", "Europe/Berln"], "did you mean 'Europe/Berlin'?"),
        (["--every", "1 fortnight"], "write a length such as 30s"),
        (["--cron", "@daily", "--every", "5s"], "one of them"),
        (["etl", "--every", "5s"], "one of them"),
        ([], "one of them"),
        (["etl", "--tz", "UTC"], "--tz goes with --cron"),
        (["--cron", "@daily", "--name", "x"], "name the DAG"),
        (["--cron", "@daily", "--from", "soon"], "--from 'soon' is not a date and time"),
        (["--cron", "@daily", "--from", "9999-12-31"], "from 1900 to 9998"),
        (["--cron", "@daily", "--from", "2025-01-02", "--to", "2025-01-01"], "before --from"),
        (["--cron", "@daily", "--from", "1950-01-01", "--to", "2060-01-01"], "longer than 100 years"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "explain"])
async def test_bad_input_is_refused_clearly(
    cli_without_database: Cli, verb: str, arguments: list[str], words: str
) -> None:
    assert words in await cli_without_database.refused("schedules", verb, *arguments)


async def test_the_calendar_has_its_colours_on_a_terminal(cli_without_database: Cli, colours) -> None:
    colours()
    out = (await cli_without_database("schedules", "simulate", *HALF_PAST_TWO, *YEAR)).out
    assert "\x1b[1;33m>\x1b[0m" in out
