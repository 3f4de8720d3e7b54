"""Files of large results go when their run is gone from the database, and not before."""

from __future__ import annotations

from pathlib import Path

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.runner.housekeeping import remove_orphans, remove_runs, result_files, stored_runs
from evertick.runtime.connections import ReconnectingConnection
from tests.engine.world import make_dag, put, start


async def test_only_files_of_runs_that_are_gone_are_removed(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    await put(conn, make_dag("d", {"a": []}))
    run_id = await start(conn, "d")
    settings = Settings(home=tmp_path)
    files = result_files(settings)
    files.put(run_id, "[1]")
    files.put(run_id + 1000, "[2]")
    link = ReconnectingConnection(database, Purpose.PLANNING)
    try:
        assert await remove_orphans(settings, link) == 1
        assert await remove_orphans(settings, link) == 0
    finally:
        await link.close()
    assert [path.name for path in (tmp_path / "results").iterdir()] == [str(run_id)]


async def test_no_folder_is_nothing_to_do(database: str, tmp_path: Path) -> None:
    link = ReconnectingConnection(database, Purpose.PLANNING)
    try:
        assert await remove_orphans(Settings(home=tmp_path), link) == 0
    finally:
        await link.close()


def test_only_folders_of_runs_are_found_and_removed(tmp_path: Path) -> None:
    assert stored_runs(tmp_path / "none") == []
    for name in ("3", "12", "notes", "٣"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    assert stored_runs(tmp_path) == [3, 12]
    remove_runs(tmp_path, [3, 99])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["12", "notes", "٣"]
