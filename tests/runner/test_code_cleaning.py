"""A runner clears unpacked code away that nobody uses, and never what it may run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.bundles.cache import MAKING, UNUSED_SECONDS, remove_unused
from evertick.runner.runner import Runner
from tests.engine.world import run_state
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
        told = await said.saw("prune")
        assert (told["folders"], list(folder.iterdir())) == (2, [])
        run = await start_run(conn, "chain")

        async def is_over() -> bool:
            return await run_state(conn, run) == "success"

        await eventually(is_over, 60)
        (used,) = folder.iterdir()
        age(used)
        assert remove_unused(folder, in_use=(), unused_seconds=UNUSED_SECONDS) == [], "a warm parent lives in it"
    assert remove_unused(folder, in_use=(), unused_seconds=UNUSED_SECONDS) == [used.name]
