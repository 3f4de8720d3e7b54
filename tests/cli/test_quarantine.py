"""`evertick quarantine`, and how other commands show what was set aside or cannot be read."""

from __future__ import annotations

from datetime import timedelta

import pytest
from psycopg import AsyncConnection

from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import reconcile_runs
from tests.cli.conftest import Cli
from tests.engine.poison import refuse
from tests.engine.world import lead, make_dag, put, start, value

ONE: dict[str, list[str]] = {"a": []}


@pytest.fixture
async def aside(conn: AsyncConnection) -> int:
    """A run that cannot be repaired, and a schedule that cannot be read."""
    epoch = await lead(conn)
    await put(conn, make_dag("etl", ONE))
    run = await start(conn, "etl")
    await conn.execute("update run_status set open_tasks = 5")
    await refuse(conn, "run_status", f"new.run_id = {run}")
    assert (await reconcile_runs(conn, shard=0, epoch=epoch, limit=10)).refused == 1
    await put(conn, make_dag("broken", ONE, every=timedelta(hours=1)))
    await conn.execute('update schedule set spec = \'{"kind": "lunar"}\'')
    await conn.execute("update schedule_state set next_due = clock()")
    assert len((await fire_schedules(conn, shard=0, epoch=epoch, batch=10)).quarantined) == 1
    return run


async def test_an_empty_quarantine_is_reported(cli: Cli, conn: AsyncConnection) -> None:
    assert (await cli("quarantine")).out == "Nothing is in quarantine.\n"
    assert await cli.json("quarantine") == {"quarantine": []}


@pytest.mark.requirement("V10")
async def test_a_quarantined_row_shows_its_reason_and_next_try(cli: Cli, aside: int) -> None:
    header, run, schedule = (await cli("quarantine")).out.splitlines()
    assert header.split() == ["OBJECT", "WHERE", "SINCE", "FAILURES", "TRIED", "AGAIN", "REASON"]
    assert run.startswith(f"run {aside}") and "etl" in run and "reconcile: this row is poison" in run
    assert "broken, schedule main" in schedule and "when it is published again" in schedule and "lunar" in schedule
    first, second = (await cli.json("quarantine"))["quarantine"]
    assert (first["kind"], first["subject_id"], first["failures"], second["retry_at"]) == ("run", aside, 1, None)


async def test_a_quarantined_run_is_reported_as_such(cli: Cli, conn: AsyncConnection, aside: int) -> None:
    shown = (await cli("runs", "show", aside)).out
    assert "Quarantined, tried again" in shown and "this row is poison" in shown
    assert (await cli.json("runs", "show", aside))["quarantine"]["verb"] == "reconcile"
    other = await start(conn, "broken")
    assert "Quarantined" not in (await cli("runs", "show", other)).out
    assert "quarantine" not in await cli.json("runs", "show", other)


@pytest.mark.requirement("V11", "N22")
async def test_a_schedule_that_cannot_be_read_spoils_no_list(cli: Cli, conn: AsyncConnection, aside: int) -> None:
    await put(conn, make_dag("fine", ONE, every=timedelta(hours=1)))
    for arguments in (
        ["schedules", "list"],
        ["dags", "list"],
        ["dags", "show", "broken"],
        ["schedules", "next", "broken"],
    ):
        ran = await cli(*arguments)
        assert ran.status == 0, ran.err
        assert "cannot be read" in ran.out
        await cli.json(*arguments)
    assert "every hour" in (await cli("schedules", "list")).out
    await conn.execute("update schedule_state set error = null")
    assert (await cli("schedules", "next", "fine")).status == 0
    assert (await cli.json("dags", "show", "broken"))["schedules"][0]["schedule"] == "cannot be read"


@pytest.mark.requirement("V11")
async def test_a_dag_that_cannot_be_read_can_be_paused_and_deleted(cli: Cli, conn: AsyncConnection, aside: int) -> None:
    await conn.execute("update dag_version set spec = '{\"tasks\": 7}'")
    for verb in (["pause"], ["unpause"], ["delete", "--yes"]):
        ran = await cli("dags", verb[0], "broken", *verb[1:])
        assert ran.status == 0, ran.err
    assert await value(conn, "select deleted_at is not null from dag where name = 'broken'")
