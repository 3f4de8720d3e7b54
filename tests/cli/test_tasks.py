"""`evertick tasks`: list, show, clear, mark."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.domain.dags.mapping import MappedList, Mapping
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, run_state, start, states

CHAIN = {"extract": [], "transform": ["extract"], "load": ["transform"]}


@pytest.fixture
async def failed(conn: AsyncConnection) -> int:
    await put(conn, make_dag("etl", CHAIN))
    run = await start(conn, "etl")
    runner = await Runner.join(conn)
    (extract,) = await runner.claim()
    await runner.finish(extract, result={"$evertick": "outputs", "value": 3, "named": {"rows": 7}}, log="")
    (transform,) = await runner.claim()
    await runner.finish(transform, "failed", reason="ValueError: \x1b[2Jno rows", exit_code=1)
    return run


async def test_tasks_are_listed_in_their_order(cli: Cli, failed: int) -> None:
    lines = (await cli("tasks", "list", failed)).out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["extract", "success"],
        ["transform", "failed"],
        ["load", "upstream_failed"],
    ]
    assert "ValueError: no rows" in lines[2]
    found = await cli.json("tasks", "list", failed)
    assert (found["run_id"], found["dag"]) == (failed, "etl")
    assert found["tasks"][1]["reason"] == "ValueError: \x1b[2Jno rows"


async def test_a_result_is_shown_as_its_value_and_its_named_results(cli: Cli, failed: int) -> None:
    shown = [line.split() for line in (await cli("tasks", "show", failed, "extract")).out.splitlines()]
    assert ["Result", "3"] in shown and ["Output", "rows", "7"] in shown
    (task,) = (await cli.json("tasks", "show", failed, "extract"))["tasks"]
    assert (task["result"], task["outputs"]) == (3, {"rows": 7})


async def test_a_cut_list_says_so(cli: Cli, failed: int) -> None:
    assert "2 of 3 tasks; see more with --limit" in (await cli("tasks", "list", failed, "--limit", 2)).out


async def test_a_task_is_shown_with_every_attempt(cli: Cli, conn: AsyncConnection, failed: int) -> None:
    await cli("tasks", "clear", failed, "transform", "--yes")
    await (await Runner.join(conn)).drain()
    out = (await cli("tasks", "show", failed, "transform")).out
    numbers = [line.split()[:2] for line in out.split("Attempts")[1].splitlines()[2:4]]
    assert numbers == [["1", "failed"], ["2", "success"]]
    assert "evertick tasks logs 1 transform" in out
    (found,) = (await cli.json("tasks", "show", failed, "transform"))["tasks"]
    assert [attempt["outcome"] for attempt in found["attempts"]] == ["failed", "success"]
    assert found["attempts"][0]["exit_code"] == 1


async def test_a_task_that_never_ran_is_shown_without_attempts(cli: Cli, failed: int) -> None:
    out = (await cli("tasks", "show", failed, "load")).out
    assert "upstream_failed" in out
    assert "Attempts" not in out


async def test_bad_input_is_refused_clearly(cli: Cli, failed: int) -> None:
    for command in (["show"], ["logs"], ["clear"]):
        assert "Did you mean 'extract'?" in await cli.refused("tasks", *command, failed, "extrakt")
        assert "There is no run 99" in await cli.refused("tasks", *command, 99, "extract")
        assert "not a run's number" in await cli.refused("tasks", *command, "x", "extract")
    assert "There is no run 99" in await cli.refused("tasks", "list", 99)
    assert "it can be marked success, failed, skipped" in await cli.refused("tasks", "mark", failed, "extract", "done")
    assert "Did you mean 'load'?" in await cli.refused("tasks", "mark", failed, "laod", "success")


async def test_marking_a_failed_task_as_success_frees_what_it_blocked(
    cli: Cli, conn: AsyncConnection, failed: int
) -> None:
    assert "Marked transform of run 1 as success" in (await cli("tasks", "mark", failed, "transform", "success")).out
    assert (await states(conn, failed))["load"] == "available"
    assert await run_state(conn, failed) == "running"
    assert "is success already" in await cli.refused("tasks", "mark", failed, "transform", "success", status=1)


async def test_marking_a_running_task_stops_it_first(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", CHAIN))
    run = await start(conn, "etl")
    await (await Runner.join(conn)).claim()
    assert "It is being stopped and will then be failed" in (await cli("tasks", "mark", run, "extract", "failed")).out
    assert "being stopped (mark_failed)" in (await cli("tasks", "list", run)).out


async def test_clearing_several_tasks_leaves_the_others(cli: Cli, conn: AsyncConnection, failed: int) -> None:
    assert "1 task would run again" in (await cli("tasks", "clear", failed, "transform", "--dry-run")).out
    await cli("tasks", "clear", failed, "transform", "load", "--yes")
    assert await states(conn, failed) == {"extract": "success", "transform": "available", "load": "waiting"}


async def test_an_instance_of_a_mapped_task_is_named_by_its_number(cli: Cli, conn: AsyncConnection) -> None:
    over = Mapping(lists=(MappedList(argument="x", length=3),))
    await put(conn, make_dag("map", {"work": [], "last": ["work"]}, per_task={"work": {"mapping": over}}))
    run = await start(conn, "map")
    runner = await Runner.join(conn)
    claims = await runner.claim()
    await runner.step([(claim, "failed" if claim.map_index == 1 else "success", {}) for claim in claims])
    listed = (await cli("tasks", "list", run)).out
    assert all(f"work[{number}]" in listed for number in range(3))
    assert "4/4" in (await cli("runs", "list")).out
    shown = await cli.json("tasks", "show", run, "work[1]")
    assert [(each["map_index"], each["state"]) for each in shown["tasks"]] == [(1, "failed")]
    assert "Did you mean 'work[1]'?" in await cli.refused("tasks", "show", run, "work[11]")
    assert "already finished" in (await cli("tasks", "why", run, "work[1]")).out
    assert "Cleared 1 task" in (await cli("tasks", "clear", run, "work[1]", "--yes")).out
    assert [(claim.idx, claim.map_index) for claim in await runner.claim()] == [(0, 1)]


async def test_a_mapped_task_is_summed_up_with_the_first_failed_instances(cli: Cli, conn: AsyncConnection) -> None:
    over = Mapping(lists=(MappedList(argument="x", length=40),))
    await put(conn, make_dag("map", {"work": []}, per_task={"work": {"mapping": over}}))
    run = await start(conn, "map")
    runner = await Runner.join(conn)
    claims = await runner.claim(40)
    await runner.step([(claim, "failed" if claim.map_index % 3 else "success", {}) for claim in claims])
    out = (await cli("tasks", "show", run, "work")).out
    assert "26 failed, 14 success" in out and len(out.splitlines()) < 25
    assert "work[1] " in out and "and 16 more" in out and f"evertick tasks show {run} 'work[1]'" in out
    assert (await cli("tasks", "show", run, "work", "--all")).out.count("Attempts") == 40
    assert len((await cli.json("tasks", "show", run, "work"))["tasks"]) == 40


async def test_an_instance_with_a_large_number_is_found(cli: Cli, conn: AsyncConnection) -> None:
    over = Mapping(lists=(MappedList(argument="x", length=1500),))
    await put(conn, make_dag("map", {"work": []}, per_task={"work": {"mapping": over}}))
    run = await start(conn, "map")
    (shown,) = (await cli.json("tasks", "show", run, "work[1400]"))["tasks"]
    assert (shown["map_index"], shown["attempts"]) == (1400, [])
    assert "Did you mean 'work[" in await cli.refused("tasks", "show", run, "work[1500]")
