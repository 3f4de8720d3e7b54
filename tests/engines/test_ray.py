"""What is Ray's own: rows of deleted jobs that come back, and jobs that stay pending for ever."""

from __future__ import annotations

import pytest

from evertick.executors.base import Phase
from tests.engines.conftest import heavy
from tests.engines.place import lines, order
from tests.engines.ray_cluster import RayCluster
from tests.engines.test_contract import canceled, executor_of, seen_as
from tests.waiting import eventually

pytestmark = [heavy, pytest.mark.xdist_group("ray")]


async def test_a_row_that_comes_back_after_its_deletion_is_deleted_again(ray: RayCluster) -> None:
    """Ray writes it if the end and the deletion meet; a runner would take it for an orphan, each time."""
    orders = [order("at", number, "ray") for number in range(4)]
    async with executor_of(ray) as executor:
        for one in orders:
            await executor.submit(one)
        for one in orders:
            await seen_as(executor, one.name, Phase.ENDED)
            await executor.cancel(one.name, 1.0)

        async def are_gone() -> bool:
            assert not {one.name for one in orders} & (await executor.observe()).keys()
            return not any(each["submission_id"].startswith("et-") for each in ray.http.get("/api/jobs/").json())

        await eventually(are_gone, 60, pause_seconds=0.5)


@pytest.mark.requirement("B11")
async def test_a_job_without_room_says_so_and_one_that_ray_forgot_is_ended(
    ray: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (order("hold", number, "ray", resources={"absent": 1}) for number in (11, 12))
    (ray.folder / "started").unlink(missing_ok=True)
    async with executor_of(ray) as executor:
        await executor.submit(one)
        await executor.submit(other)
        waiting = await executor.find(one.name)
        assert waiting is not None and waiting.phase is Phase.WAITING
        assert waiting.reason is not None and waiting.reason.startswith("pending in Ray: ")
        await executor.cancel(one.name, 1.0)
        stopped = await executor.find(one.name)
        assert stopped is not None and stopped.phase is Phase.ENDED
        monkeypatch.setattr("evertick.executors.ray._LONGEST_PENDING_SECONDS", 0.0)
        given_up = (await executor.observe())[other.name]
        assert given_up.phase is Phase.ENDED and "Ray did not start it within" in str(given_up.reason)
    assert lines(ray, "started") == []


async def test_a_job_whose_supervisor_is_gone_has_ended(ray: RayCluster) -> None:
    one = order("stubborn", 13, "ray")
    async with executor_of(ray) as executor:
        await executor.submit(one)
        await seen_as(executor, one.name, Phase.RUNNING)
        await eventually(lambda: one.name in lines(ray, "started"), 60)
        await canceled(executor, one.name, 1.0)
