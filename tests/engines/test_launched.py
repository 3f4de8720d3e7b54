"""Runners that a launcher starts on engines that run: from nothing to many and back, and every fault that the engine allows."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.domain.access import Actor
from evertick.engine.runs import cancel
from evertick.launcher.launcher import Launcher
from tests.engine.world import value
from tests.engines.conftest import heavy
from tests.engines.docker_engine import ContainerEngine
from tests.engines.place import Place
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.world import START_SECONDS, World, installation
from tests.system.hosting import Said, hosted
from tests.waiting import elapse, eventually

FLEET = '[far]\nengine = "{engine}"\nmax = {most}\nslots = {slots}\nidle = "{idle}"\n'
# Without jobs and processes of others a task takes some 15 ms; the machine of these tests runs a cluster, too.
_LONGEST_P50_SECONDS = 0.03


class Fleets:
    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.file, self.said = world, folder / "fleets.toml", Said()

    @asynccontextmanager
    async def launcher(self, *, most: int = 1, slots: int = 4, idle: str = "60s") -> AsyncIterator[Launcher]:
        world = self.world
        self.file.write_text(FLEET.format(engine=world.place.engine, most=most, slots=slots, idle=idle))
        command = world.place.agent.replace("evertick agent", "evertick runner")
        settings = replace(
            world.settings, fleets_file=self.file, launched_command=command, executor="local", fleet_lease_seconds=2.0
        )
        made = Launcher(settings, url=str(settings.database_url), owner="one", log=self.said.log)
        async with hosted(made):  # type: ignore[arg-type]
            yield made

    async def is_empty(self) -> None:
        async def is_so() -> bool:
            names = {name for name in await self.world.place.names() if name.startswith("er-")}
            return await value(self.world.conn, "select count(*) from pilot") == 0 and not names

        await eventually(is_so, START_SECONDS, pause_seconds=0.05)

    async def alive(self) -> int:
        text = "select count(*) from runner where ended_at is null and queues <> '{}'"
        return int(await value(self.world.conn, text))


@pytest.fixture
async def there(conn: AsyncConnection, database: str, tmp_path: Path, place: Place) -> AsyncIterator[Fleets]:
    async with installation(conn, database, tmp_path, place) as world:
        yield Fleets(world, tmp_path)


async def test_runners_start_with_the_load_and_leave_without(there: Fleets) -> None:
    """The first task waits for the engine, the following ones take milliseconds, and in the end nothing is left."""
    world = there.world
    async with there.launcher(idle="3s"):
        began = time.monotonic()
        assert await world.ended(await world.run("chain")) == "success"
        cold = time.monotonic() - began
        for _ in range(20):
            assert await world.ended(await world.run("chain")) == "success"
        text = "select extract(epoch from finished_at - started_at) from run_status order by run_id"
        rows = await (await world.conn.execute(text)).fetchall()
        # A chain has two tasks.
        p50 = statistics.median(float(row[0]) / 2 for row in rows[1:])
        print(f"{world.place.engine}: cold {cold:.2f} s, p50 of a task {1000 * p50:.1f} ms")
        assert await there.alive() == 1
        await there.is_empty()
    assert not there.said.events("runner_lost") and not there.said.events("runner_launch_failed")


@heavy
@pytest.mark.requirement("A16", "A11", "B10")
async def test_what_is_killed_is_replaced_and_what_lives_is_adopted(there: Fleets) -> None:
    """A launcher that is killed while its runner works, a run that is canceled, a runner that is killed."""
    world = there.world
    first = asyncio.create_task(_until_killed(there))
    adopted = await world.run("holding")
    name = await world.begun(adopted)
    first.cancel()
    await asyncio.wait([first])
    async with there.launcher():
        await there.said.saw("fleet_leadership_acquired", within_seconds=START_SECONDS, epoch=2)
        canceled = await world.run("holding")
        assert await world.begun(canceled) == name
        await cancel(world.conn, run_id=canceled, actor=Actor("test"))
        assert await world.ended(canceled) == "canceled"
        world.go(adopted)
        assert await world.ended(adopted) == "success"
        killed = await world.run("holding")
        assert await world.begun(killed) == name
        await world.place.kill_attempt(name)
        assert await world.begun(killed, epoch=2) != name
        world.go(killed)
        assert await world.ended(killed) == "success"
        # By the engine's word, or by that of another process of the same machine.
        assert (await world.reason(killed)).startswith(f"agent_lost: runner {name} ")
    assert len(there.said.events("runner_launched")) == 2
    assert await value(world.conn, "select max(epoch) from task where run_id = %s", adopted) == 1


async def _until_killed(there: Fleets) -> None:
    """Its lease stays, as if its process had been killed."""
    world = there.world
    there.file.write_text(FLEET.format(engine=world.place.engine, most=1, slots=4, idle="60s"))
    command = world.place.agent.replace("evertick agent", "evertick runner")
    settings = replace(
        world.settings, fleets_file=there.file, launched_command=command, executor="local", fleet_lease_seconds=2.0
    )
    await Launcher(settings, url=str(settings.database_url), owner="zero", log=there.said.log).run()


@heavy
async def test_a_backlog_of_500_starts_runners_within_two_seconds(
    conn: AsyncConnection, database: str, tmp_path: Path, docker: ContainerEngine
) -> None:
    async with installation(conn, database, tmp_path, docker) as world:
        fleets = Fleets(world, tmp_path)
        async with fleets.launcher(most=3, slots=16, idle="20s"):
            await fleets.said.saw("fleet_leadership_acquired")
            began = time.monotonic()
            runs = [await world.run("chain") for _ in range(500)]

            async def are_started() -> bool:
                return len(await _containers(docker)) >= 3

            await eventually(are_started)
            started = time.monotonic() - began
            for run_id in runs:
                assert await world.ended(run_id) == "success"
            await fleets.is_empty()
        print(f"docker: three containers {started:.2f} s after the first of 500 runs")
        sizes = [each["count"] for each in fleets.said.events("runners_requested")]
        assert sum(sizes) == 3, f"none was started again: {sizes}"


async def _containers(docker: ContainerEngine) -> list[str]:
    return [name for name in await asyncio.to_thread(docker.names_now) if name.startswith("er-")]


@heavy
@pytest.mark.requirement("B11")
async def test_a_daemon_that_was_killed_has_its_runners_again(
    conn: AsyncConnection, database: str, tmp_path: Path, docker: ContainerEngine
) -> None:
    """The engine cannot be asked for a while: the runner works on, and nothing is started or declared lost."""
    async with installation(conn, database, tmp_path, docker) as world:
        fleets = Fleets(world, tmp_path)
        async with fleets.launcher(most=2):
            held = await world.run("holding")
            name = await world.begun(held)
            docker.kill()
            try:
                await fleets.said.saw("executor_unavailable", within_seconds=START_SECONDS)
                assert await world.ended(await world.run("chain")) == "success"
                assert "cannot be reached" in str(await eventually(lambda: value(conn, "select trouble from fleet")))
            finally:
                docker.start()
            await eventually(lambda: value(conn, "select trouble is null from fleet"), START_SECONDS)
            world.go(held)
            assert await world.ended(held) == "success"
            assert await value(conn, "select array_agg(name) from pilot") == [name]
    assert await value(conn, "select max(epoch) from task") == 1


@heavy
async def test_a_controller_that_forgot_a_job_loses_no_runner_that_lives(
    conn: AsyncConnection, database: str, tmp_path: Path, slurm: SlurmCluster
) -> None:
    """It is killed a moment after it accepted the job: whatever it knows afterwards, the task runs to its end."""
    async with installation(conn, database, tmp_path, slurm) as world:
        fleets = Fleets(world, tmp_path)
        # A runner that died with its job is declared dead after this silence.
        world.settings = replace(world.settings, lost_after_seconds=10.0)
        async with fleets.launcher(idle="10s"):
            held = await world.run("holding")
            await fleets.said.saw("runner_launched", within_seconds=START_SECONDS)
            slurm.kill("controller")
            await elapse(2.0)
            slurm.start("controller")

            async def begun() -> bool:
                return any(world.place.folder.glob(f"begun-{held}-*"))

            await eventually(begun, 3 * START_SECONDS)
            world.go(held)
            assert await world.ended(held) == "success"
            await fleets.is_empty()
    slurm.wait_until_idle()
