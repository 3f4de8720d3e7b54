"""`evertick runners`: list, drain and undrain."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.db.queries.runners import NewRunner
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start, value
from tests.waiting import eventually

_PLACE = {"host": "h", "boot_id": "b", "pid_namespace": "p", "pid": 1, "pid_started": 0.0}


async def join(conn: AsyncConnection, session: int, runner_id: str, name: str | None = None) -> Runner:
    new = NewRunner(session=session, runner_id=runner_id, name=name, queues=["default"], slots=4, **_PLACE)  # type: ignore[arg-type]
    await runners.register(conn, new)
    return Runner(conn, session)


async def requests(conn: AsyncConnection) -> dict[int, str | None]:
    cursor = await conn.execute("select session, request from runner")
    return dict(await cursor.fetchall())


async def test_without_a_runner_the_list_says_that_nothing_can_run(cli: Cli) -> None:
    assert "No runner is alive" in (await cli("runners", "list")).out
    assert await cli.json("runners", "list") == {"runners": []}


@pytest.mark.requirement("K5")
async def test_runners_are_listed_with_who_they_are_and_how_busy(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": [], "b": []}))
    await start(conn, "etl")
    busy, _ = await join(conn, 0xABCD, "gpu-1", "the big one"), await join(conn, 0xEF, "gpu-2")
    await busy.claim()
    titles, first, second = (await cli("runners", "list")).out.splitlines()
    assert titles.split()[:7] == ["RUNNER", "NAME", "STATE", "BUSY", "TRIGGERS", "QUEUES", "EXECUTOR"]
    assert titles.split()[7:] == ["TRANSPORT", "PATTERNS", "HOST", "PID", "STARTED", "HEARTBEAT", "VERSION", "SESSION"]
    assert first.split()[:6] == ["gpu-1", "the", "big", "one", "busy", "2/4"]
    assert first.split()[6:12] == ["-", "default", "local", "database", "-", "h"]
    assert first.split()[-1] == "000000000000abcd"
    assert second.split()[:4] == ["gpu-2", "-", "idle", "0/4"]
    found, other = (await cli.json("runners", "list"))["runners"]
    assert (found["session"], found["name"], found["state"]) == ("000000000000abcd", "the big one", "busy")
    assert (found["busy"], found["slots"], other["state"], other["request"]) == (2, 4, "idle", None)


async def test_a_drain_shows_in_the_list_until_it_is_taken_back(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    await start(conn, "one")
    runner = await join(conn, 7, "r1")
    (claim,) = await runner.claim()

    async def state() -> str:
        return str((await cli.json("runners", "list"))["runners"][0]["state"])

    said = (await cli("runners", "drain", "r1")).out
    assert "Runner r1 (session 0000000000000007) drains (1 task running)." in said
    assert await state() == "draining"
    await runner.finish(claim)
    assert await state() == "idle (drained)"
    assert "takes work again" in (await cli("runners", "undrain", "r1")).out
    assert await state() == "idle"
    assert "None of them was drained" in (await cli("runners", "undrain", "--all")).out
    assert await value(conn, "select count(*) from audit_log where actor like 'cli:%%' and action like '%%drain'") == 2


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (["gpu"], {1, 2}),
        (["fast"], {2, 3}),
        (["0000000000000003"], {3}),
        (["00000000deadbeef"], {0xDEADBEEF}),
        (["cpu", "deadbeef"], None),
        (["cpu", "gpu"], {1, 2, 3}),
        (["--all"], {1, 2, 3, 0xDEADBEEF}),
    ],
)
async def test_a_runner_is_meant_by_id_name_or_session_and_a_shared_one_means_all(
    cli: Cli, conn: AsyncConnection, which: list[str], expected: set[int] | None
) -> None:
    for session, runner_id, name in ((1, "gpu", None), (2, "gpu", "fast"), (3, "cpu", "fast"), (0xDEADBEEF, "x", None)):
        await join(conn, session, runner_id, name)
    ran = await cli("runners", "drain", *which)
    asked = {session for session, request in (await requests(conn)).items() if request == "drain"}
    if expected is None:
        # The digits of a session are given from its first one on.
        assert (ran.status, asked) == (2, set())
        assert "There is no live runner 'deadbeef'" in ran.err
    else:
        assert (ran.status, asked) == (0, expected)


async def test_draining_to_stop_is_another_request(cli: Cli, conn: AsyncConnection) -> None:
    await join(conn, 1, "r1")
    assert "ends when its attempts have ended" in (await cli("runners", "drain", "r1", "--stop")).out
    assert await requests(conn) == {1: "leave"}


async def test_a_drain_can_be_waited_for(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("one", {"a": []}))
    await start(conn, "one")
    runner, _ = await join(conn, 1, "r1"), await join(conn, 2, "r2")
    (claim,) = await runner.claim()
    late = await cli("runners", "drain", "r1", "--wait", "--timeout", "0.3")
    assert (late.status, "not finished yet" in late.out) == (124, True)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cli("runners", "drain", "--all", "--wait"))
        await eventually(lambda: value(conn, "select request = 'drain' from runner where session = 2"))
        assert not waiting.done()
        await runner.finish(claim)
    assert (waiting.result().status, "All of their attempts have ended" in waiting.result().out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["drain"], "Name a runner, or all of them with --all"),
        (["drain", "r1", "--all"], "Name a runner, or all of them with --all"),
        (["undrain"], "Name a runner"),
        (["drain", "nobody"], "There is no live runner 'nobody'"),
        (["drain", "r1", "--timeout", "5"], "add --wait"),
    ],
)
async def test_bad_input_is_refused_clearly(cli: Cli, conn: AsyncConnection, arguments: list[str], words: str) -> None:
    await join(conn, 1, "r1")
    assert words in await cli.refused("runners", *arguments)
    assert await requests(conn) == {1: None}
