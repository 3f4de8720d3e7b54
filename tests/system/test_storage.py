"""Large results between runners that share nothing but the database and an object storage, also while that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.s3_server import S3Server, s3_server
from tests.system.processes import Installation
from tests.system.work import Published, loaded, publish_work, start_run

DAGS = """
from evertick import dag, task

@task(queue="left")
def make():
    return "x" * 5000

@task(queue="right")
def measure(text: str):
    return len(text)

@dag
def far_apart():
    measure(make())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3") as running:
        yield running


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(DAGS, tmp_path_factory.mktemp("dags"))


@pytest.fixture
async def there(database: str, tmp_path: Path, server: S3Server, work: Published) -> AsyncIterator[Installation]:
    storage = {**server.settings, "result_spill_bytes": 1024}
    async with Installation(database, tmp_path / "there", **storage) as installation:
        await publish_work(installation.conn, work)
        yield installation


async def runner(there: Installation, side: str, **settings: object) -> None:
    """One whose disk nobody else can see."""
    await there.start("runner", runner_id=side, runner_queues=(side,), results_folder=there.folder / side, **settings)


async def result(there: Installation, run_id: int) -> object:
    return await there.value("select value from result where run_id = %s and idx = 1", run_id)


async def test_a_result_waits_out_an_outage_of_the_storage_and_is_read_on_another_machine(
    there: Installation, server: S3Server
) -> None:
    server.stop()
    await runner(there, "left")
    await runner(there, "right")
    run_id = await start_run(there.conn, "far_apart")
    left = there.services[0]
    await left.saw("storage_unavailable", doing="store")
    assert await there.value("select count(*) from result where run_id = %s", run_id) == 0
    server.start()
    assert await there.ended(run_id, 60) == "success"
    assert await result(there, run_id) == 5000
    assert [path.parent.name for path in server.files()] == [str(run_id)]
    for side in ("left", "right"):
        assert len(list((there.folder / side / str(run_id)).iterdir())) == 1


async def test_a_storage_that_stays_away_fails_the_task_with_the_reason(there: Installation, server: S3Server) -> None:
    server.stop()
    await runner(there, "left", storage_retry_seconds=0.1)
    run_id = await start_run(there.conn, "far_apart")
    assert await there.ended(run_id, 60) == "failed"
    reason = await there.value("select reason from all_attempts where run_id = %s and idx = 0", run_id)
    assert reason.startswith("the result could not be stored within 0.1 s: s3://attic/below/here cannot be reached")


async def test_a_runner_that_leaves_before_its_result_is_stored_gives_the_task_back(
    there: Installation, server: S3Server
) -> None:
    server.stop()
    await runner(there, "left")
    run_id = await start_run(there.conn, "far_apart")
    left = there.services[0]
    await left.saw("storage_unavailable", doing="store")
    assert await left.terminate() == 0
    assert await there.value("select state::text from task where run_id = %s and idx = 0", run_id) == "available"
