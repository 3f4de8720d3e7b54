"""`evertick runs`: list, show, watch, cancel, clear."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from psycopg import AsyncConnection
from rich.console import Console

from evertick.cli.commands.watch import Snapshot, picture, take_snapshot
from evertick.client.connect import open_client
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, run_state, start, states

CHAIN = {"extract": [], "transform": ["extract"], "load": ["transform"]}


@pytest.fixture
async def failed(conn: AsyncConnection) -> int:
    """A run whose middle task failed."""
    await put(conn, make_dag("etl", CHAIN))
    run = await start(conn, "etl")
    await (await Runner.join(conn)).drain({"transform": "failed"})
    return run


async def test_an_empty_list_tells_how_to_start_a_run(cli: Cli, conn: AsyncConnection) -> None:
    assert "No runs and no DAGs yet" in (await cli("runs", "list")).out
    await put(conn, make_dag("etl", CHAIN))
    assert "Start one with: evertick dags trigger etl" in (await cli("runs", "list")).out
    assert "No run matches" in (await cli("runs", "list", "--state", "failed")).out
    assert await cli.json("runs", "list") == {"runs": []}


async def test_runs_are_listed_newest_first_and_filtered(cli: Cli, conn: AsyncConnection, failed: int) -> None:
    await put(conn, make_dag("other", {"a": []}))
    newer = await start(conn, "other")
    lines = (await cli("runs", "list")).out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        [str(newer), "other", "running", "0/1"],
        [str(failed), "etl", "failed", "3/3"],
    ]
    assert len((await cli.json("runs", "list", "--limit", "1"))["runs"]) == 1
    assert [run["run_id"] for run in (await cli.json("runs", "list", "etl"))["runs"]] == [failed]
    assert [run["run_id"] for run in (await cli.json("runs", "list", "--state", "failed"))["runs"]] == [failed]


async def test_runs_are_filtered_by_tag_kind_date_and_text_and_show_the_date_they_are_for(
    cli: Cli, conn: AsyncConnection, failed: int
) -> None:
    await put(conn, make_dag("sales", {"a": []}, tags=("daily", "money")))
    keyed = await start(conn, "sales", key="north-7")
    old = await start(conn, "sales")
    await conn.execute("update run set kind = 'backfill', fire_at = '2025-03-30 05:00Z' where run_id = %s", [old])

    async def found(*arguments: object) -> list[int]:
        return [run["run_id"] for run in (await cli.json("runs", "list", *arguments))["runs"]]

    assert await found("--tag", "money") == [old, keyed]
    assert await found("--tag", "none") == []
    assert await found("etl", "--tag", "money") == []
    assert await found("--kind", "backfill") == [old]
    assert await found("sales", "--kind", "manual") == [keyed]
    assert await found("--since", "2h") == [keyed, failed]
    assert await found("sales", "--since", "2h") == [keyed]
    assert await found("--since", "2025-03-30T05:00Z", "--until", "2025-03-31") == [old]
    assert await found("--until", "2025-03-30T05:00Z") == []
    assert await found("--until", "2025-03-30T23:00-12:00", "--contains", "ALE") == [old]
    assert await found("--contains", "ale") == [old, keyed]
    assert await found("--contains", "rth-") == [keyed]
    assert await found("--contains", "%") == []
    (line,) = [line for line in (await cli("runs", "list")).out.splitlines() if line.split()[0] == str(old)]
    assert f"{datetime(2025, 3, 30, 5, tzinfo=UTC).astimezone():%Y-%m-%d %H:%M}" in line
    assert "No run of sales matches" in (await cli("runs", "list", "sales", "--state", "failed")).out
    assert "2025-03-30, 2025-03-30T02:30, or an age" in await cli.refused("runs", "list", "--since", "yesterday")


async def test_a_run_for_programs_has_stable_names_and_utc_times(cli: Cli, failed: int) -> None:
    (found,) = (await cli.json("runs", "list"))["runs"]
    assert set(found) == {
        "run_id", "dag", "version", "kind", "key", "fire_at", "params", "triggered_by", "created_at", "state", "open_tasks",
        "cancel_requested", "started_at", "finished_at", "reason", "task_count", "retried",
    }  # fmt: skip
    assert found["created_at"].endswith("Z")


async def test_bad_input_is_refused_clearly(cli: Cli, failed: int) -> None:
    assert "'faild'" in await cli.refused("runs", "list", "--state", "faild")
    assert "Did you mean 'etl'?" in await cli.refused("runs", "list", "etll")
    assert "'twelve' is not a run's number" in await cli.refused("runs", "show", "twelve")
    assert "There is no run 99" in await cli.refused("runs", "show", 99)
    assert "There is no run" in await cli.refused("runs", "show", "9" * 30)
    assert "There is no run" in await cli.refused("runs", "show", "9" * 6000)
    assert "--limit" in await cli.refused("runs", "list", "--limit", 0)
    assert "Did you mean 'etl'?" in await cli.refused("runs", "watch", "elt")
    assert "There is no run 99" in await cli.refused("runs", "watch", 99)


async def test_a_run_is_shown_with_its_tasks_and_what_was_done_to_it(cli: Cli, failed: int) -> None:
    await cli("tasks", "mark", failed, "extract", "skipped")
    out = (await cli("runs", "show", failed)).out
    assert "etl, version 1" in out
    transform = next(line for line in out.splitlines() if line.startswith("transform"))
    assert transform.split()[1:3] == ["failed", "1/1"]
    assert "mark" in out.split("Activity")[1]
    found = await cli.json("runs", "show", failed)
    assert found["run"]["run_id"] == failed
    assert [task["task"] for task in found["tasks"]] == list(CHAIN)
    assert [entry["verb"] for entry in found["audit"]] == ["mark"]


async def test_watching_an_ended_run_tells_how_it_ended(cli: Cli, failed: int) -> None:
    ran = await cli("runs", "watch", failed)
    assert ran.status == 1
    assert "Run 1 of etl: failed" in ran.out


async def test_watching_programs_get_one_document_at_the_end(cli: Cli, failed: int) -> None:
    ran = await cli("runs", "watch", failed, "--json")
    assert (ran.status, ran.json["run"]["state"], len(ran.json["tasks"])) == (1, "failed", 3)
    assert "name a run by its number" in await cli.refused("runs", "watch", "etl", "--json")


async def test_watching_a_dag_ends_when_the_time_is_up(cli: Cli, failed: int, colours: Callable[[], None]) -> None:
    ran = await cli("runs", "watch", "etl", "--timeout", "0.1")
    assert (ran.status, f"run {failed} failed" in ran.out) == (0, True)
    colours()
    assert "etl" in (await cli("runs", "watch", "etl", "--timeout", "0.1")).out


async def test_a_terminal_gets_a_picture_that_is_redrawn(
    cli: Cli, conn: AsyncConnection, colours: Callable[[], None]
) -> None:
    await put(conn, make_dag("etl", CHAIN))
    run = await start(conn, "etl")
    colours()
    watching = asyncio.create_task(cli("runs", "watch", run))
    await (await Runner.join(conn)).drain()
    ran = await watching
    assert ran.status == 0
    assert "\x1b[" in ran.out
    assert "3/3" in ran.out


async def test_the_picture_of_a_large_run_shows_what_matters_and_counts_the_rest(
    cli: Cli, conn: AsyncConnection
) -> None:
    await put(conn, make_dag("wide", {f"task{n:03}": [] for n in range(100)}))
    run = await start(conn, "wide")
    runner = await Runner.join(conn)
    first, *_, last = await runner.claim()
    await runner.finish(first, "failed")
    await runner.finish(last)
    console = Console(width=100, record=True, file=io.StringIO())

    def snapshot() -> Snapshot:
        with open_client() as client:
            return take_snapshot(client, run, 99)

    console.print(picture(await asyncio.to_thread(snapshot)))
    text = console.export_text()
    assert "2/100" in text
    assert "running 98" in text
    assert "task000" in text
    assert "task099" not in text
    assert "and 1 more task" in text


async def test_canceling_ends_what_waits_and_stops_what_runs(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    run = await start(conn, "etl")
    await (await Runner.join(conn)).claim()
    ran = await cli("runs", "cancel", run, "--reason", "wrong day")
    assert "1 running task will stop" in ran.out
    assert (await states(conn, run))["load"] == "canceled"
    out = (await cli("runs", "list")).out
    assert "running, canceling" in out
    assert "wrong day" in (await cli("runs", "show", run)).out


async def test_an_ended_run_cannot_be_canceled(cli: Cli, failed: int) -> None:
    assert "already ended (failed)" in await cli.refused("runs", "cancel", failed, status=1)
    assert "There is no run 99" in await cli.refused("runs", "cancel", 99)


async def test_a_clear_shows_what_it_would_do_and_asks(cli: Cli, conn: AsyncConnection, failed: int) -> None:
    preview = await cli("runs", "clear", failed, "--failed", "--dry-run")
    assert preview.status == 0
    assert [line.split()[0] for line in preview.out.splitlines()[1:3]] == ["transform", "load"]
    assert "2 tasks would run again; nothing was changed" in preview.out
    assert "use --yes" in await cli.refused("runs", "clear", failed, "--failed")
    assert await run_state(conn, failed) == "failed"


async def test_a_clear_runs_what_failed_again(cli: Cli, conn: AsyncConnection, failed: int) -> None:
    ran = await cli("runs", "clear", failed, "--failed", "--yes")
    assert "Cleared 2 tasks of run 1" in ran.out
    assert await states(conn, failed) == {"extract": "success", "transform": "available", "load": "waiting"}


@pytest.mark.parametrize(
    ("answer", "status", "after"), [("y\n", 0, "running"), ("n\n", 1, "failed"), ("", 130, "failed")]
)
async def test_somebody_at_a_terminal_is_asked(
    cli: Cli, conn: AsyncConnection, failed: int, monkeypatch: pytest.MonkeyPatch, answer: str, status: int, after: str
) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Keyboard(answer))
    ran = await cli("runs", "clear", failed, "--failed")
    assert ran.status == status
    assert "Run 2 tasks of run 1 again?" in ran.out
    assert await run_state(conn, failed) == after


async def test_a_clear_of_a_named_task_takes_what_follows_if_asked(
    cli: Cli, conn: AsyncConnection, failed: int
) -> None:
    await cli("runs", "clear", failed, "--task", "extract", "--yes")
    assert (await states(conn, failed))["transform"] == "failed"
    await cli("runs", "clear", failed, "--task", "transform", "--downstream", "--yes")
    assert await states(conn, failed) == {"extract": "available", "transform": "waiting", "load": "waiting"}
    assert "nothing to clear" in (await cli("runs", "clear", failed, "--task", "load", "--yes")).out
    assert "Did you mean 'load'?" in await cli.refused("runs", "clear", failed, "--task", "laod")


async def test_clearing_a_running_task_says_that_it_is_stopped_first(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    run = await start(conn, "etl")
    await (await Runner.join(conn)).claim()
    assert "1 running task will be stopped first" in (await cli("runs", "clear", run, "--yes")).out


async def test_a_clear_on_the_newest_version_says_which_and_refuses_other_tasks(
    cli: Cli, conn: AsyncConnection, failed: int
) -> None:
    await put(conn, make_dag("etl", CHAIN, max_active_tasks=5))
    preview = await cli("runs", "clear", failed, "--failed", "--latest", "--dry-run")
    assert "The run continues with version 2; it began with version 1." in preview.out
    assert (await cli.json("runs", "show", failed))["run"]["version"] == 1
    await cli("runs", "clear", failed, "--failed", "--latest", "--yes")
    assert (await cli.json("runs", "show", failed))["run"]["version"] == 2
    await (await Runner.join(conn)).drain()
    assert await run_state(conn, failed) == "success"
    await put(conn, make_dag("etl", {**CHAIN, "tell": ["load"]}))
    told = await cli.refused("runs", "clear", failed, "--latest", "--yes", status=1)
    assert "Version 3 of etl has other tasks than run 1 began with (tell is new): start a new run of it, with" in told


async def test_several_runs_are_canceled_and_cleared_after_a_preview(
    cli: Cli, conn: AsyncConnection, failed: int
) -> None:
    others = [await start(conn, "etl") for _ in range(3)]
    assert "Name runs by their numbers, or choose them" in await cli.refused("runs", "cancel")
    preview = await cli("runs", "cancel", "--dag", "etl", "--dry-run")
    assert "3 runs; nothing was changed." in preview.out and f" {failed} " not in preview.out
    assert "use --yes" in await cli.refused("runs", "cancel", *others)
    assert await cli("runs", "cancel", others[0]) and await run_state(conn, others[0]) == "canceled"
    assert "Canceled 2 runs" in (await cli("runs", "cancel", "--dag", "etl", "--since", "1h", "--yes")).out
    assert {await run_state(conn, each) for each in others} == {"canceled"}
    assert "No run matches" in (await cli("runs", "cancel", "--dag", "etl", "--yes")).out
    done = await cli("runs", "clear", "--dag", "etl", "--failed", "--yes")
    assert "Cleared 2 tasks of 1 run." in done.out, done
