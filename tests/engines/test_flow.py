"""A whole installation on an engine that runs, with real agents: what a DAG does there, and every fault that the engine allows."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.domain.access import Actor
from evertick.engine.runs import cancel
from tests.engine.world import value
from tests.engines.conftest import heavy
from tests.engines.docker_engine import ContainerEngine
from tests.engines.place import Place
from tests.engines.world import START_SECONDS, World, installation
from tests.waiting import eventually


@pytest.fixture
async def world(conn: AsyncConnection, database: str, tmp_path: Path, place: Place) -> AsyncIterator[World]:
    async with installation(conn, database, tmp_path, place, place.agent) as made:
        yield made


@pytest.mark.requirement("A11")
async def test_a_dag_runs_there_and_nothing_of_it_is_left(world: World) -> None:
    """Results, the log, options of a task, and a task that the engine refuses; in the end there is no object, and none was
    taken for an orphan."""
    async with world.runner():
        run_id, refused = await world.run("chain"), await world.run("refused")
        assert await world.ended(run_id) == "success"
        assert await world.results(run_id) == [[1, None], [1, None, "us"]]
        assert "a line from far away" in await world.log(run_id)
        assert await world.ended(refused) == "failed"
        said = await world.reason(refused)
        assert re.search(world.place.refused[0][1], said), said
        await world.nothing_is_left()
    assert world.said.events("orphan_removed") == []


@heavy
@pytest.mark.requirement("A16", "A11", "B10")
async def test_what_is_killed_is_found_and_what_lives_goes_on(world: World) -> None:
    """A run that is canceled, an attempt that is killed, a runner that is killed while its attempt goes on."""
    async with world.runner_process():
        adopted = await world.run("holding")
        await world.begun(adopted)
    async with world.runner(dispatch_lost_seconds=2):
        await world.said.saw("dispatch_adopted", within_seconds=START_SECONDS)
        world.go(adopted)
        assert await world.ended(adopted) == "success"
        canceled = await world.run("holding")
        await world.begun(canceled)
        await cancel(world.conn, run_id=canceled, actor=Actor("test"))
        assert await world.ended(canceled) == "canceled"
        killed = await world.run("holding")
        await world.place.kill_attempt(await world.begun(killed))
        await world.begun(killed, epoch=2)
        world.go(killed)
        assert await world.ended(killed) == "success"
        assert (await world.reason(killed)).startswith("agent_lost: its agent ended without reporting an outcome")
        await world.nothing_is_left()
    assert await value(world.conn, "select max(epoch) from task where run_id = %s", adopted) == 1
    assert world.said.events("orphan_removed") == []


@heavy
async def test_what_an_agent_could_not_report_is_read_from_what_it_left(world: World) -> None:
    """The API goes away while the task runs, and does not come back."""
    async with world.runner(agent_command=f"env EVERTICK_AGENT_REPORT_SECONDS=0.5 {world.place.agent}"):
        run_id = await world.run("holding")
        await world.begun(run_id)
        world.api.stop.set()
        world.api.wake.set()
        world.go(run_id)
        assert await world.ended(run_id) == "success"
        await world.nothing_is_left()
    assert await world.results(run_id) == ["held"]
    assert await value(world.conn, "select max(epoch) from task") == 1


@heavy
@pytest.mark.requirement("B11")
async def test_a_daemon_that_was_killed_has_its_containers_again(
    conn: AsyncConnection, database: str, tmp_path: Path, docker: ContainerEngine
) -> None:
    """The container lives on, its task ends meanwhile or later, and nothing is lost; a task that came meanwhile waits."""
    async with installation(conn, database, tmp_path, docker) as world, world.runner():
        run_id, short = await world.run("holding"), await world.run("holding")
        await world.begun(run_id)
        await world.begun(short)
        docker.kill()
        try:
            world.go(short)
            assert await world.ended(short) == "success"
            meanwhile = await world.run("chain")
            await world.said.saw("dispatch_failed", within_seconds=START_SECONDS, reason="unavailable")
        finally:
            docker.start()
        assert await world.ended(meanwhile) == "success"
        world.go(run_id)
        assert await world.ended(run_id) == "success"
        await world.nothing_is_left()
    assert await value(conn, "select max(epoch) from task") == 1


@heavy
async def test_a_container_above_its_memory_says_so(
    conn: AsyncConnection, database: str, tmp_path: Path, docker: ContainerEngine
) -> None:
    async with installation(conn, database, tmp_path, docker) as world, world.runner(infra_retries=0):
        run_id = await world.run("eating")
        assert await world.ended(run_id) == "failed"
        reason = await eventually(lambda: world.reason(run_id))
        assert "SIGKILL" in reason or "OOMKilled" in reason, reason
        await world.nothing_is_left()
