"""A runner deletes unpacked code that is not used and files of runs that are gone, and never what may still be needed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.bundles.cache import MAKING, UNUSED_SECONDS, remove_unused
from evertick.config import Settings
from evertick.db.queries import runs
from evertick.runner.housekeeping import remove_orphaned_files, remove_runs, stored_runs
from evertick.runner.runner import Runner
from evertick.storage.results import result_files
from tests.engine.world import make_dag, put, run_state, start
from tests.system.hosting import Said, hosted, quick
from tests.system.work import SMALL, Published, loaded, publish_work, start_run
from tests.waiting import eventually

LONG_AGO = UNUSED_SECONDS + 3600


def age(place: Path) -> None:
    then = time.time() - LONG_AGO
    os.utime(place, (then, then))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setenv("EFFECTS", str(tmp_path / "effects"))
    monkeypatch.setenv("RUNNER_NAME", "r0")
    return loaded(SMALL, tmp_path / "dags")


async def test_a_runner_clears_away_what_nobody_uses_and_keeps_what_its_warm_parents_have(
    database: str, conn: AsyncConnection, tmp_path: Path, work: Published
) -> None:
    await publish_work(conn, work, only=["chain"])
    settings, said = quick(database, tmp_path / "home"), Said()
    folder = settings.bundles_folder
    for name in ("0" * 64, f"{MAKING}left"):
        (folder / name).mkdir(parents=True)
        age(folder / name)
    async with hosted(Runner(settings, url=database, log=said.log)):
        told = await said.saw("bundles_pruned")
        assert (told["folders"], list(folder.iterdir())) == (2, [])
        run = await start_run(conn, "chain")

        async def is_over() -> bool:
            return await run_state(conn, run) == "success"

        await eventually(is_over, 60)
        (used,) = folder.iterdir()
        age(used)
        assert remove_unused(folder, in_use=(), unused_seconds=UNUSED_SECONDS) == [], "a warm parent lives in it"
    assert remove_unused(folder, in_use=(), unused_seconds=UNUSED_SECONDS) == [used.name]


async def test_only_files_of_runs_that_are_gone_are_removed(conn: AsyncConnection, tmp_path: Path) -> None:
    await put(conn, make_dag("d", {"a": []}))
    run_id = await start(conn, "d")
    settings = Settings(home=tmp_path)
    files = result_files(settings)
    files.put(run_id, "[1]")
    files.put(run_id + 1000, "[2]")

    async def existing(run_ids: list[int]) -> set[int]:
        return await runs.existing(conn, run_ids)

    assert await remove_orphaned_files(settings, existing) == 1
    assert await remove_orphaned_files(settings, existing) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == [str(run_id)]


async def test_no_folder_is_nothing_to_do(tmp_path: Path) -> None:
    async def existing(run_ids: list[int]) -> set[int]:
        raise AssertionError(run_ids)

    assert await remove_orphaned_files(Settings(home=tmp_path), existing) == 0


def test_only_folders_of_runs_are_found_and_removed(tmp_path: Path) -> None:
    assert stored_runs(tmp_path / "none") == []
    for name in ("3", "12", "notes", "٣"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    assert stored_runs(tmp_path) == [3, 12]
    remove_runs(tmp_path, [3, 99])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["12", "notes", "٣"]
