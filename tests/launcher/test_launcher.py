"""A launcher whose fleets are processes of this machine: runners start with the load, leave without, and survive it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import gates
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings, NotLeader, Unauthenticated
from evertick.domain.explain import describe
from evertick.domain.fleets import read_fleets
from evertick.engine import runner_tokens
from evertick.engine.runner_tokens import (
    SeenPilot,
    add_pilots,
    end_pilot,
    leave_fleet,
    note_fleet,
    pilots_of,
    renew_fleet_lease,
    withdraw_pilot,
)
from evertick.launcher.fleet_leader import place_of, variables_of
from evertick.launcher.launcher import Launcher
from evertick.observability.health import ServiceHealth
from evertick.runner.registration import draw_runner
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.runner.reach import Reach, reaching
from tests.system.hosting import Said, hosted, quick
from tests.system.work import LONG, Published, effects, executed_twice, let_go, loaded, publish_work, start_run
from tests.waiting import eventually

FLEETS = (
    '[far]\nengine = "process"\nqueues = ["default"]\nmin = {least}\nmax = {most}\nslots = {slots}\nidle = "{idle}"\n'
)
# A process starts an interpreter, on a machine that may be busy.
START_SECONDS = 60.0


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(LONG, tmp_path_factory.mktemp("dags"))


@dataclass(kw_only=True)
class World:
    conn: AsyncConnection
    database: str
    reach: Reach
    file: Path
    folder: Path

    @property
    def objects(self) -> Path:
        return self.folder / "home" / "fleets" / "far" / "agents" / "attempts"

    def settings(self, *, idle: str = "300s", least: int = 0, most: int = 3, slots: int = 2) -> Settings:
        fleets = self.folder / "fleets.toml"
        fleets.write_text(FLEETS.format(idle=idle, least=least, most=most, slots=slots))
        changes: dict[str, Any] = {"fleets_file": fleets, "fleet_lease_seconds": 1.0, "agent_key": ("k" * 43,)}
        made = quick(self.database, self.folder / "home", lost_after_seconds=60.0, **changes)
        return replace(made, agent_api_url=self.reach.url)

    @asynccontextmanager
    async def launcher(self, said: Said, *, owner: str = "one", **fleet: Any) -> AsyncIterator[Launcher]:
        made = Launcher(self.settings(**fleet), url=self.database, owner=owner, log=said.log)
        async with hosted(made):  # type: ignore[arg-type]
            yield made

    async def started(self, count: int) -> list[int]:
        return [await start_run(self.conn, "holding") for _ in range(count)]

    async def began(self, count: int) -> None:
        await eventually(lambda: sum(each.task == "hold" for each in effects(self.file)) >= count, START_SECONDS)

    async def alive(self) -> int:
        return int(await value(self.conn, "select count(*) from runner where ended_at is null"))

    async def ended(self, run_ids: list[int]) -> None:
        async def are_over() -> bool:
            return all([await run_state(self.conn, run_id) == "success" for run_id in run_ids])

        await eventually(are_over, START_SECONDS)

    async def is_empty(self) -> None:
        async def is_so() -> bool:
            left = list(self.objects.iterdir())
            return await value(self.conn, "select count(*) from pilot") == 0 and await self.alive() == 0 and not left

        await eventually(is_so, START_SECONDS)


@pytest.fixture
async def world(
    conn: AsyncConnection, database: str, tmp_path: Path, work: Published, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    file = tmp_path / "effects"
    file.touch()
    monkeypatch.setenv("EFFECTS", str(file))
    monkeypatch.setenv("RUNNER_NAME", "far")
    await publish_work(conn, work, only=["holding"])
    await invariants.install(conn)
    async with reaching("https", database, conn, tmp_path) as reach:
        made = World(conn=conn, database=database, reach=reach, file=file, folder=tmp_path)
        yield made
        for each in made.objects.glob("er-*/pid"):
            with suppress(ProcessLookupError):
                os.kill(int(each.read_text().split()[0]), signal.SIGKILL)
    assert await invariants.violations(conn) == []
    assert executed_twice(effects(file)) == []


async def test_a_backlog_starts_runners_and_idle_ones_leave(world: World) -> None:
    """As many as its tasks need, up to the limit; `why` says so; and in the end there are none."""
    said = Said()
    runs = await world.started(5)
    async with world.launcher(said, idle="1s"):
        await said.saw("runners_requested")
        (reason,) = await gates.explain_task(world.conn, TaskKey(runs[0], 0, -1))
        told = describe(reason)
        assert "being started by fleet far on process" in told or "is running" in told, told
        await world.began(5)
        assert await world.alive() == 3
        assert ServiceHealth("launcher", owner="one").complaints() == []
        let_go(world.file)
        await world.ended(runs)
        await world.is_empty()
    assert said.events("runners_requested", desired=3) and not said.events("runner_lost")
    assert await value(world.conn, "select array_agg(distinct end_reason) from runner") == ["stopped"]
    assert await value(world.conn, "select bool_and(revoked_at is not null) from runner_token where name ^@ 'er-far-'")


async def test_a_killed_runner_is_replaced_at_once_and_its_task_runs_again(world: World) -> None:
    said = Said()
    (run_id,) = await world.started(1)
    async with world.launcher(said, most=1):
        await world.began(1)
        os.kill(int(await value(world.conn, "select pid from runner")), signal.SIGKILL)
        await said.saw("runner_lost", attempts=1)
        await world.began(2)
        let_go(world.file)
        await world.ended([run_id])
    reason = await value(world.conn, "select reason from attempt where run_id = %s", run_id)
    assert str(reason).startswith("agent_lost: runner er-far-") and "SIGKILL" in str(reason)


async def test_of_two_launchers_one_leads_and_the_other_adopts_what_runs(world: World) -> None:
    """The first is killed: nothing is started twice, and nothing is lost."""
    first, second = Said(), Said()
    runs = await world.started(1)
    killed = Launcher(world.settings(), url=world.database, owner="one", log=first.log)
    running = asyncio.create_task(killed.run())
    await first.saw("fleet_leadership_acquired")
    async with world.launcher(second, owner="two"):
        await world.began(1)
        assert not second.events("fleet_leadership_acquired")
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await second.saw("fleet_leadership_acquired", epoch=2)
        runs += await world.started(3)
        await world.began(4)
        assert await world.alive() == 2 and await value(world.conn, "select count(*) from pilot") == 2
        let_go(world.file)
        await world.ended(runs)
    assert sum(each["count"] for each in first.events("runners_requested")) == 1
    assert await value(world.conn, "select max(epoch) from task") == 1


async def test_a_runner_that_cannot_join_is_not_started_again_without_a_pause(world: World) -> None:
    said = Said()
    (run_id,) = await world.started(1)
    world.reach = replace(world.reach, url="http://127.0.0.1:1/nothing")
    async with world.launcher(said, most=1):
        await eventually(lambda: said.events("runner_launched"), START_SECONDS)
        pid = next(world.objects.glob("er-*/pid"))
        os.kill(int(pid.read_text().split()[0]), signal.SIGKILL)
        failed = await said.saw("runner_launch_failed")
        assert failed["retry_in"] > 0 and "ended before it joined" in str(failed["error"])

        async def told() -> bool:
            (reason,) = await gates.explain_task(world.conn, TaskKey(run_id, 0, -1))
            return "can start no runner: the last one ended before it joined" in describe(reason)

        await eventually(told)


# Every change is fenced


SPEC: dict[str, object] = {"engine": "process", "queues": ["q"], "least": 0, "most": 2, "slots": 1}


async def lead(conn: AsyncConnection, leader: str, epoch: int | None = None, *, seconds: float = 60.0) -> int | None:
    return await renew_fleet_lease(conn, "f", leader=leader, epoch=epoch, seconds=seconds, spec=SPEC)


async def test_a_launcher_that_was_replaced_changes_nothing(conn: AsyncConnection) -> None:
    old = await lead(conn, "one")
    assert old == 1 and await lead(conn, "two") is None and await lead(conn, "one", old) == 1
    names = await add_pilots(conn, "f", epoch=1, token_seconds=60, secrets={f"er-f-{n}": f"evr_{n}" for n in range(3)})
    assert names == ["er-f-0", "er-f-1"], "not above the limit"
    assert not await leave_fleet(conn, "f", epoch=7) and await leave_fleet(conn, "f", epoch=1)
    assert await lead(conn, "two") == 2 and await lead(conn, "one", old) is None
    with pytest.raises(NotLeader):
        await add_pilots(conn, "f", epoch=1, token_seconds=60, secrets={"er-f-9": "evr_9"})
    with pytest.raises(NotLeader):
        await note_fleet(conn, "f", epoch=1, desired=9, trouble="x", seen=[])
    assert await withdraw_pilot(conn, "f", epoch=1, name="er-f-0") is None
    assert await end_pilot(conn, "f", epoch=1, name="er-f-0", reason="x", infra_retries=0) is None
    assert [row.is_withdrawn for row in await pilots_of(conn, "f")] == [False, False]
    assert await end_pilot(conn, "f", epoch=2, name="er-f-0", reason="x", infra_retries=0) == 0
    assert await end_pilot(conn, "f", epoch=2, name="er-f-0", reason="x", infra_retries=0) is None
    assert await value(conn, "select desired from fleet") == 0


async def test_a_leader_changes_only_the_runners_of_its_fleet(conn: AsyncConnection) -> None:
    assert await lead(conn, "one") == 1
    assert await renew_fleet_lease(conn, "g", leader="one", epoch=None, seconds=60, spec={**SPEC, "queues": ["r"]}) == 1
    await add_pilots(conn, "f", epoch=1, token_seconds=60, secrets={"er-f-0": "evr_0"})
    assert await withdraw_pilot(conn, "g", epoch=1, name="er-f-0") is None
    assert await end_pilot(conn, "g", epoch=1, name="er-f-0", reason="x", infra_retries=0) is None
    seen = SeenPilot(name="er-f-0", phase="running", reason="x", is_submitted=True)
    await note_fleet(conn, "g", epoch=1, desired=1, trouble="full", seen=[seen])
    (row,) = await pilots_of(conn, "f")
    assert (row.phase, row.is_submitted, row.is_withdrawn) == ("waiting", False, False)
    assert await value(conn, "select array_agg(desired order by name) from fleet") == [0, 1]
    assert await value(conn, "select revoked_at is null from runner_token")


async def test_a_withdrawn_runner_cannot_join_and_a_joined_one_drains(conn: AsyncConnection, tmp_path: Path) -> None:
    assert await lead(conn, "one") == 1
    await add_pilots(conn, "f", epoch=1, token_seconds=60, secrets={f"er-f-{n}": f"evr_{n}" for n in range(2)})
    settings = quick("postgresql://", tmp_path, runner_queues=("q",))
    joined = draw_runner(settings)
    token = await runner_tokens.find_token(conn, "evr_0")
    await runner_tokens.join(conn, token, joined, origin="here")
    assert await withdraw_pilot(conn, "f", epoch=1, name="er-f-0") == "draining"
    assert await value(conn, "select request from runner where session = %s", joined.session) == "leave"
    late = await runner_tokens.find_token(conn, "evr_1")
    assert await withdraw_pilot(conn, "f", epoch=1, name="er-f-1") == "withdrawn"
    with pytest.raises(Unauthenticated):
        await runner_tokens.join(conn, late, draw_runner(settings), origin="here")
    rows = {row.name: row for row in await pilots_of(conn, "f")}
    await conn.execute("update runner set ended_at = clock()")
    assert await withdraw_pilot(conn, "f", epoch=1, name="er-f-0") == "withdrawn", "its runner has left"
    assert rows["er-f-1"].is_withdrawn and rows["er-f-0"].session == joined.session


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="set EVERTICK_FLEETS_FILE"):
        Launcher(quick("postgresql://", tmp_path), url="", owner="one", log=Said().log)
    with pytest.raises(InvalidSettings, match=r"fleets\.toml cannot be read"):
        Launcher(
            quick("postgresql://", tmp_path, fleets_file=tmp_path / "fleets.toml"), url="", owner="one", log=Said().log
        )


def test_a_slurm_runner_takes_no_work_at_the_end_of_its_job_and_returns_the_rest_before_it(tmp_path: Path) -> None:
    text = '[gpu]\nengine = "slurm"\nmax = 1\noptions = {time = "1-00:00:00", arguments = ["--exclusive"]}\n'
    (fleet,) = read_fleets(text)
    assert place_of(fleet) == {"slurm": {"time": "1-00:00:00", "arguments": ["--exclusive", "--signal=B:TERM@60"]}}
    given = variables_of(fleet, quick("postgresql://", tmp_path))
    assert given["EVERTICK_RUNNER_UNTIL_SECONDS"] == str(0.9 * 86_400)
    assert given["EVERTICK_RUNNER_IDLE_SECONDS"] == "600.0", "twice: for when no launcher is alive"
    assert (
        variables_of(replace(fleet, least=1), quick("postgresql://", tmp_path))["EVERTICK_RUNNER_IDLE_SECONDS"] == "0"
    )
