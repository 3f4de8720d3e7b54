"""`evertick dags trigger`: parameters, keys, waiting, and what the exit status says."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runs
from evertick.domain.access import Actor
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.runs import cancel
from tests.cli.conftest import Cli, Ran
from tests.engine.world import Runner, make_dag, put, value
from tests.system.hosting import armed
from tests.waiting import eventually

CHAIN = {"extract": [], "load": ["extract"]}
PARAMS = (
    ParamSpec(name="rows", type=ParamType.INTEGER, default=5, minimum=1),
    ParamSpec(name="table", type=ParamType.STRING, default="orders"),
)


async def _started(conn: AsyncConnection) -> int:
    found = await eventually(lambda: runs.list_newest(conn))
    return int(found[0].run_id)


async def _waited(cli: Cli, conn: AsyncConnection, outcomes: dict[str, str], *options: str) -> Ran:
    """Trigger and wait, while a runner ends the tasks as told."""
    waiting = asyncio.create_task(cli("dags", "trigger", "etl", "--wait", *options))
    await _started(conn)
    await (await Runner.join(conn)).drain(outcomes)
    return await waiting


async def test_a_run_is_started_and_the_way_to_follow_it_told(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    await Runner.join(conn)
    ran = await cli("dags", "trigger", "etl")
    assert ran.status == 0
    assert ran.out.splitlines() == ["Started run 1 of etl.", "Follow it with: evertick runs watch 1"]


async def test_without_a_runner_it_says_why_nothing_happens(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    assert "No runner is alive, so nothing runs yet" in (await cli("dags", "trigger", "etl")).out


async def test_parameters_come_as_pairs_and_as_json(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, params=PARAMS))
    found = await cli.json("dags", "trigger", "etl", "--params", '{"rows": 7, "table": "a"}', "-p", "table=b=c")
    assert found["is_new"] is True
    assert found["run"]["params"] == {"rows": 7, "table": "b=c"}
    assert found["run"]["triggered_by"].startswith("cli:")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--param", "rows"], "write --param name=value"),
        (["--param", "=3"], "write --param name=value"),
        (["--param", "rows=many"], "param 'rows' is 'many', but must be an integer"),
        (["--param", "rows=0"], "at least 1"),
        (["--param", "rosw=3"], "did you mean 'rows'?"),
        (["--params", "{rows: 3}"], "--params is not JSON"),
        (["--params", "[1]"], "not an object"),
        (["--params", '{"what": 1}'], "unknown param 'what'"),
        (["--timeout", "5s"], "add --wait"),
        (["--wait", "--timeout", "soon"], "--timeout 'soon'"),
        (["--key", " "], "--key is empty"),
        (["--for", "yesterday"], "--for 'yesterday' is not a date and time"),
    ],
)
async def test_bad_input_starts_nothing_and_says_what_is_wrong(
    cli: Cli, conn: AsyncConnection, options: list[str], words: str
) -> None:
    await put(conn, make_dag("etl", CHAIN, params=PARAMS))
    assert words in await cli.refused("dags", "trigger", "etl", *options)
    assert await runs.list_newest(conn) == []


async def test_a_run_is_for_the_date_that_is_given_in_the_zone_of_the_schedule(cli: Cli, conn: AsyncConnection) -> None:
    every = parse_schedule("0 6 * * *", timezone="Europe/Berlin")
    await put(conn, make_dag("etl", CHAIN, schedules=(NamedSchedule(name="daily", spec=every),)))
    await Runner.join(conn)
    ran = await cli("dags", "trigger", "etl", "--for", "2026-11-01", "--key", "k")
    assert ran.out.splitlines()[0] == "Started run 1 of etl for 2026-10-31 23:00:00 UTC."
    again = await cli("dags", "trigger", "etl", "--for", "2026-11-01T00:00", "--key", "k")
    assert "Run 1 of etl has this key already" in again.out
    told = await cli.refused("dags", "trigger", "etl", "--for", "2026-11-01", status=1)
    assert "already has run 1 for 2026-10-31 23:00:00+00:00: clear that run to run it again, or choose another" in told
    assert "is for another date" in await cli.refused(
        "dags", "trigger", "etl", "--for", "2026-11-02", "--key", "k", status=1
    )
    assert await value(conn, "select count(*) from run") == 1


@pytest.mark.requirement("N17", "M3", "F3")
async def test_a_trigger_whose_answer_is_lost_is_made_again_and_is_one_run(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    await Runner.join(conn)
    with armed("trigger_run:drop_reply:1"):
        ran = await cli("dags", "trigger", "etl")
    assert (ran.status, ran.err) == (0, "The answer of the database was lost. Trying again.\n")
    assert ran.out.splitlines()[0] == "Started run 1 of etl."
    assert await value(conn, "select count(*) from run") == 1


@pytest.mark.requirement("N17")
async def test_a_trigger_that_is_never_answered_says_how_to_repeat_it_safely(
    cli: Cli, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(conn, make_dag("etl", CHAIN))
    monkeypatch.setattr("evertick.client.connect.RETRY_SECONDS", ())
    with armed("trigger_run:drop_reply:1"):
        ran = await cli("dags", "trigger", "etl")
    assert ran.status == 4
    assert "it is not known whether this was done" in ran.err
    key = ran.err.strip().rpartition(" ")[2]
    again = await cli.json("dags", "trigger", "etl", "--key", key)
    assert (again["is_new"], again["run"]["run_id"]) == (False, 1)


@pytest.mark.requirement("N17")
async def test_a_change_without_a_key_whose_answer_is_lost_is_not_made_again(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    await cli("dags", "trigger", "etl")
    with armed("cancel_run:drop_reply:1"):
        said = await cli.refused("runs", "cancel", "1", status=4)
    assert "was lost" in said and "Check before you repeat it" in said
    assert await value(conn, "select count(*) from audit_log where action = 'cancel'") == 1
    with armed("cancel_run:error:1"):
        assert "Check before you repeat it" in await cli.refused("runs", "cancel", "1", status=4)


async def test_the_same_key_is_the_same_run(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    first = await cli.json("dags", "trigger", "etl", "--key", "monday")
    again = await cli.json("dags", "trigger", "etl", "--key", "monday")
    assert (again["is_new"], again["run"]["run_id"]) == (False, first["run"]["run_id"])
    assert "has this key already" in (await cli("dags", "trigger", "etl", "--key", "monday")).out


async def test_a_run_of_a_paused_dag_waits_and_says_for_what(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, starts_paused=True))
    assert "evertick dags unpause etl" in (await cli("dags", "trigger", "etl")).out


async def test_waiting_shows_each_task_and_ends_with_success(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    ran = await _waited(cli, conn, {})
    assert ran.status == 0
    assert "extract success" in ran.out
    assert ran.out.splitlines()[-1].startswith("Run 1 of etl: success in ")


async def test_a_failed_run_is_status_one_with_the_reason_and_the_way_to_its_log(
    cli: Cli, conn: AsyncConnection
) -> None:
    await put(conn, make_dag("etl", CHAIN))
    ran = await _waited(cli, conn, {"extract": "failed"})
    assert ran.status == 1
    assert "load upstream_failed" in ran.out
    assert "evertick tasks logs 1 extract" in ran.out


async def test_a_canceled_run_is_status_three(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    waiting = asyncio.create_task(cli("dags", "trigger", "etl", "--wait"))
    await cancel(conn, run_id=await _started(conn), actor=Actor("test"))
    assert (await waiting).status == 3


async def test_waiting_too_long_is_status_124_and_the_run_goes_on(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    ran = await cli("dags", "trigger", "etl", "--wait", "--timeout", "0.3")
    assert ran.status == 124
    assert "still running" in ran.err
    assert "evertick runs watch 1" in ran.err


async def test_waiting_programs_get_one_document_at_the_end(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    ran = await _waited(cli, conn, {"extract": "failed"}, "--json")
    assert ran.status == 1
    assert ran.json["run"]["state"] == "failed"
    assert [(task["task"], task["state"]) for task in ran.json["tasks"]] == [
        ("extract", "failed"),
        ("load", "upstream_failed"),
    ]
    assert (await cli("dags", "trigger", "etl", "--wait", "--timeout", "0.3", "--json")).status == 124


async def test_waiting_for_a_run_with_many_failed_tasks_says_how_many_more(cli: Cli, conn: AsyncConnection) -> None:
    names = [f"t{number:02}" for number in range(19)]
    await put(conn, make_dag("etl", {name: [] for name in names}))
    ran = await _waited(cli, conn, dict.fromkeys(names, "failed"))
    assert "  and 14 more: evertick tasks list 1 --state failed" in ran.out
    assert "See why with: evertick tasks logs 1 t00" in ran.out
    listed = (await cli("tasks", "list", 1, "--state", "failed")).out
    assert len(listed.splitlines()) == 20
