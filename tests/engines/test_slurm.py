"""What is Slurm's own: it forgets jobs and accepts a name twice, and the end of a node is not the end of a process."""

from __future__ import annotations

import asyncio

import pytest

from evertick.config import Settings
from evertick.domain.errors import ExecutorUnavailable
from evertick.executors.base import Phase
from tests.engines.conftest import heavy
from tests.engines.place import go, lines, order
from tests.engines.slurm_cluster import SlurmCluster
from tests.engines.test_contract import canceled, executor_of, seen_as
from tests.waiting import eventually

pytestmark = [heavy, pytest.mark.xdist_group("slurm")]
_SECONDS = 60.0


@pytest.fixture(autouse=True)
def clean(slurm: SlurmCluster) -> None:
    for left in ("started", "stopped"):
        (slurm.folder / left).unlink(missing_ok=True)


@pytest.mark.requirement("A11")
async def test_two_runners_that_submit_at_once_start_it_once(slurm: SlurmCluster) -> None:
    """Neither saw the other's job. The second job waits until the first has ended, and nobody waits for it."""
    one = order("hold", 1, "slurm")
    async with executor_of(slurm) as executor, executor_of(slurm) as other:
        await asyncio.gather(executor.submit(one), other.submit(one))
        twin = slurm.folder / "twin.sh"
        twin.write_text("#!/bin/sh\nsleep 60\n")
        comment = "--comment=evertick:evertick"
        slurm.says("sbatch", "--dependency=singleton", f"--job-name={one.name}", comment, "-o", "/dev/null", str(twin))
        await eventually(lambda: lines(slurm, "started"), _SECONDS)
        assert (await executor.observe())[one.name].phase is Phase.RUNNING
        go(slurm, one.name)
        await seen_as(executor, one.name, Phase.ENDED)
        await canceled(executor, one.name, 1.0)
        assert await slurm.names() == set()
    assert lines(slurm, "started") == [one.name]


async def test_a_job_that_waits_says_why(slurm: SlurmCluster) -> None:
    """And one that is asked to stop meanwhile never starts."""
    one, other = (
        order("hold", number, "slurm", cpus=16, partition="second", time="00:10:00", memory="100M") for number in (2, 3)
    )
    async with executor_of(slurm) as executor:
        await executor.submit(one)
        await eventually(lambda: lines(slurm, "started"), _SECONDS)
        await executor.submit(other)

        async def reason() -> str | None:
            found = await executor.find(other.name)
            return found.reason if found is not None and found.phase is Phase.WAITING else None

        assert await eventually(reason, _SECONDS) in ("pending in Slurm: Resources", "pending in Slurm: Priority")
        await canceled(executor, other.name, 1.0)
        await canceled(executor, one.name, 1.0)
    assert lines(slurm, "started") == [one.name]


@pytest.mark.requirement("B11", "V5")
async def test_a_controller_that_is_away_is_an_outage_and_no_end(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on, ends, and is forgotten; its outcome is in its folder."""
    monkeypatch.setattr("evertick.executors.slurm._SECONDS", 2.0)
    one = order("hold", 4, "slurm")
    async with executor_of(slurm) as executor:
        await executor.submit(one)
        await eventually(lambda: lines(slurm, "started"), _SECONDS)
        slurm.kill("controller")
        for call in (executor.observe(), executor.find(one.name), executor.submit(order("hold", 5, "slurm"))):
            with pytest.raises(ExecutorUnavailable):
                await call
        go(slurm, one.name)
        slurm.start("controller")

        async def is_known_again() -> bool:
            try:
                return (await executor.find(one.name)) is not None
            except ExecutorUnavailable:
                return False

        await eventually(is_known_again, _SECONDS, pause_seconds=0.2)
        ended = await seen_as(executor, one.name, Phase.ENDED)
        # MinJobAge later Slurm knows nothing of it.
        await eventually(lambda: not slurm.says("squeue", "-h", "--states=all", "-n", one.name), 90, pause_seconds=0.5)
        forgotten = await executor.find(one.name)
        assert forgotten is not None
        assert forgotten.outcome == ended.outcome is not None
        await canceled(executor, one.name, 1.0)


@pytest.mark.requirement("V5")
async def test_a_node_that_is_gone_proves_nothing(slurm: SlurmCluster) -> None:
    """Slurm says NODE_FAIL while the process goes on: it runs, with the reason, until it is silent or Slurm forgets it."""
    one = order("hold", 6, "slurm", partition="second")
    async with executor_of(slurm) as executor:
        await executor.submit(one)
        await eventually(lambda: lines(slurm, "started"), _SECONDS)
        slurm.kill("n2")

        async def trouble() -> str | None:
            found = await executor.find(one.name)
            assert found is None or found.phase is Phase.RUNNING
            return found.reason if found is not None else None

        assert "NODE_FAIL" in await eventually(trouble, 90, pause_seconds=0.5)
        go(slurm, one.name)
        slurm.start("n2")
        slurm.wait_until_idle()

        async def is_over() -> bool:
            found = await executor.find(one.name)
            return found is None or found.phase is Phase.ENDED

        await eventually(is_over, 90, pause_seconds=0.5)
        await canceled(executor, one.name, 1.0)
    assert lines(slurm, "started") == [one.name]


def test_without_its_commands_it_is_a_setting_to_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    from evertick.domain.errors import InvalidSettings
    from evertick.executors.registry import open_executor

    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InvalidSettings, match="needs sbatch, which is not in the PATH"):
        open_executor(Settings(executor="slurm"))
