"""`evertick dags`: list, show, pause, unpause, delete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.publish import publish
from tests.cli.conftest import Cli
from tests.engine.world import Runner, hourly_from_half_an_hour_on, make_dag, put, start

CHAIN = {"extract": [], "load": ["extract"]}
ROWS = ParamSpec(name="rows", type=ParamType.INTEGER, default=5, minimum=1, description="how many")


async def test_without_dags_the_list_says_where_to_put_one(cli: Cli) -> None:
    ran = await cli("dags", "list")
    assert (ran.status, "No DAGs yet" in ran.out, "./dags" in ran.out) == (0, True, True)
    assert await cli.json("dags", "list") == {"dags": [], "import_errors": []}


async def test_the_list_shows_schedule_state_and_last_run(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, schedules=hourly_from_half_an_hour_on(), tags=("nightly",)))
    await put(conn, make_dag("idle", {"a": []}, starts_paused=True))
    await start(conn, "etl")
    await (await Runner.join(conn)).drain()
    etl, idle = (await cli("dags", "list")).out.splitlines()[1:]
    assert etl.split()[:5] == ["etl", "on", "every", "hour", "in"]
    assert "success" in etl
    assert etl.endswith("nightly")
    assert idle.split()[:3] == ["idle", "paused", "manual"]


async def test_the_list_for_programs_has_stable_names(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, every="@every 1h", description="nightly load"))
    run = await start(conn, "etl")
    (found,) = (await cli.json("dags", "list"))["dags"]
    assert found["dag"] == "etl"
    assert (found["is_paused"], found["version"], found["task_count"]) == (False, 1, 2)
    assert found["schedules"][0]["schedule"] == "every hour"
    assert found["schedules"][0]["next_due"].endswith("Z")
    assert (found["last_run"]["run_id"], found["last_run"]["state"]) == (run, "running")
    assert found["import_error"] is None


async def test_broken_files_are_listed_and_mark_their_dags(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    await dags.put_import_error(conn, file="etl.py", line=7, message="SyntaxError: oops", detail="")
    await dags.put_import_error(conn, file="new.py", line=None, message="it \x1b[2Jcrashed", detail="")
    out = (await cli("dags", "list")).out
    assert out.splitlines()[1].split()[:2] == ["etl", "broken"]
    assert "Broken: etl.py:7: SyntaxError: oops" in out
    assert "Broken: new.py: it crashed" in out
    found = await cli.json("dags", "list")
    assert found["dags"][0]["import_error"]["line"] == 7
    assert [each["file"] for each in found["import_errors"]] == ["etl.py", "new.py"]


async def test_a_dag_is_shown_whole(cli: Cli, conn: AsyncConnection) -> None:
    early = NamedSchedule(name="early", spec=parse_schedule("30 6 * * *", timezone="Europe/Berlin"))
    spec = make_dag(
        "etl",
        CHAIN,
        params=(ROWS,),
        description="nightly load",
        schedules=(early,),
        task_retry=RetryPolicy(retries=3, delay_seconds=10),
        per_task={"load": {"timeout_seconds": 90}},
    )
    await put(conn, spec)
    out = (await cli("dags", "show", "etl")).out
    assert "nightly load" in out
    assert "cron 30 6 * * * (Europe/Berlin)" in out
    assert out.count("in ") >= 3
    assert "an integer of at least 1" in out
    load = next(line for line in out.splitlines() if line.startswith("load"))
    assert " ".join(load.split()) == "load python extract all_success 3 × 10 s fixed 1 min 30 s default 5 process"
    assert "evertick dags trigger etl" in out


async def test_a_dag_for_programs_has_tasks_with_their_upstream(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, params=(ROWS,), every="@every 1h"))
    found = await cli.json("dags", "show", "etl")
    assert [(task["task"], task["upstream"]) for task in found["tasks"]] == [("extract", []), ("load", ["extract"])]
    assert len(found["schedules"][0]["next_fires"]) == 3
    assert found["params"][0]["name"] == "rows"


async def test_a_dag_with_threads_and_a_broken_file_says_both(cli: Cli, conn: AsyncConnection) -> None:
    await dags.put_bundle(conn, bundle_hash="t", file="f.py", archive=b"", uses_threads="pool-1, telemetry")
    await publish(conn, spec=make_dag("etl", CHAIN), file="etl.py", bundle_hash="t", actor=Actor("test"))
    await dags.put_import_error(conn, file="etl.py", line=7, message="SyntaxError: oops", detail="")
    out = (await cli("dags", "show", "etl")).out
    assert "runs in fresh interpreters because importing it starts threads: pool-1, telemetry" in out
    assert "etl.py:7: SyntaxError: oops" in out
    assert "Start it with `evertick dags trigger" in out
    assert (await cli.json("dags", "show", "etl"))["uses_threads"] == "pool-1, telemetry"


async def test_an_unknown_dag_is_refused_with_the_nearest_name(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("customers", CHAIN))
    for command in ("show", "pause", "unpause", "trigger", "delete"):
        assert "Did you mean 'customers'?" in await cli.refused("dags", command, "custmers")


async def test_pausing_twice_says_so_and_unpausing_lets_it_go_on(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, every="@every 1h"))
    assert "etl is paused" in (await cli("dags", "pause", "etl")).out
    assert "paused already" in (await cli("dags", "pause", "etl")).out
    assert (await cli.json("dags", "list"))["dags"][0]["is_paused"] is True
    assert "paused" in (await cli("dags", "show", "etl")).out
    assert "etl resumed" in (await cli("dags", "unpause", "etl")).out
    assert "was not paused" in (await cli("dags", "unpause", "etl")).out


async def test_a_dag_is_deleted_only_when_somebody_agrees(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN, every="@every 1h"))
    run = await start(conn, "etl")
    assert "use --yes" in await cli.refused("dags", "delete", "etl")
    deleted = await cli("dags", "delete", "etl", "--yes")
    assert (deleted.status, "etl.py" in deleted.out) == (0, True)
    assert (await cli.json("dags", "list"))["dags"] == []
    assert (await cli.json("runs", "list", "etl"))["runs"][0]["run_id"] == run


async def test_dags_are_filtered_and_names_stay_whole_on_a_narrow_terminal(
    cli: Cli, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch, colours: Callable[[], None]
) -> None:
    long = "deadlines.callback.tell"
    await put(conn, make_dag(long, {"a": []}, every="*/5 * * * *", tags=("finance", "nightly", "reporting")))
    await put(conn, make_dag("etl", {"a": []}, tags=("finance",)))
    await put(conn, make_dag("other", {"a": []}))

    async def names(*arguments: str) -> list[str]:
        return [row["dag"] for row in (await cli.json("dags", "list", *arguments))["dags"]]

    assert await names("--tag", "finance") == [long, "etl"]
    assert await names("--contains", "ther") == ["other"]
    assert "use --yes" in await cli.refused("dags", "pause", "--tag", "finance")
    assert "Name DAGs, or choose them" in await cli.refused("dags", "pause")
    assert f"{long} is paused.\netl is paused." in (await cli("dags", "pause", "--tag", "finance", "--yes")).out
    assert await names("--status", "paused") == [long, "etl"]
    assert await names("--status", "on") == ["other"]
    assert "No DAG matches" in (await cli("dags", "list", "--tag", "none")).out
    colours()
    monkeypatch.setenv("COLUMNS", "80")
    assert long in (await cli("dags", "list")).out


SQUARES = """
from evertick import Param, dag, task

@task
def rows(context):
    return [context.fire_at.year] * context.params["n"]

@task
def total(values):
    print("total", sum(values))
    return sum(values)

@task
def fails(value):
    raise ValueError("broken")

@dag(params={"n": Param(2)})
def sums():
    fails(total(rows()))
"""


async def test_a_dag_and_a_task_run_in_this_process_without_a_server(cli_without_database: Cli, nowhere: Path) -> None:
    cli = cli_without_database
    assert "There is no folder dags" in await cli.refused("dags", "test", "sums")
    (nowhere / "dags").mkdir()
    (nowhere / "dags" / "sums.py").write_text(SQUARES)
    (nowhere / "dags" / "other.py").write_text("from evertick import dag\nraise ValueError('never mind')\n")
    ran = await cli("dags", "test", "sums", "--param", "n=3", "--for", "2025-11-01")
    assert ran.status == 1 and "total 6075" in ran.out and "ValueError: broken" in ran.out
    assert ran.out.splitlines()[-1] == "sums: failed"
    one = await cli("tasks", "test", "sums", "total", "--for", "2025-11-01")
    assert (one.status, "total 4050" in one.out, "fails" in one.out) == (0, True, False), one
    assert (await cli("tasks", "test", "sums", "fails", "--for", "2025-11-01")).status == 1
    assert "has no task 'x'; it has: rows, total, fails" in await cli.refused("tasks", "test", "sums", "x")
    assert "Did you mean 'sums'?" in await cli.refused("dags", "test", "sum")
