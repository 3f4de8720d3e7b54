"""From a DAG file with packages of its own to its tasks: published with a lock, run in the locked environment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.bundles import cache
from evertick.bundles.bundle import contents
from evertick.bundles.dependencies import LOCK_FILE
from evertick.bundles.environments import Environments
from evertick.db.queries import dags
from evertick.publisher import publisher as publishing
from evertick.publisher.publisher import Publisher
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler
from tests.bundles.package_index import from_folder, make_wheel, uv_environment
from tests.engine.world import run_state, start, value
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

DAG = """
# /// script
# dependencies = ["{package}"]
# ///
import alpha
from evertick import dag, task, shell

@task
def version() -> str:
    return alpha.VERSION

@dag
def {name}():
    shell("say", "echo {{{{ inputs.version }}}}", inputs={{"version": version()}})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dags").mkdir()
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "alpha", version)
    return tmp_path / "dags"


@pytest.fixture
def wheels(tmp_path: Path, folder: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def publisher(database: str, folder: Path, tmp_path: Path, wheels: Path) -> Callable[..., Publisher]:
    def make(said: Said | None = None, **settings: Any) -> Publisher:
        chosen = quick(database, tmp_path / "home", dags_folder=folder, listen_notify=False, **settings)
        return Publisher(chosen, url=database, environment=from_folder(wheels), log=(said or Said()).log)

    return make


def write(folder: Path, name: str, package: str, *, more: str = "") -> None:
    (folder / f"{name}.py").write_text(DAG.format(name=name, package=package) + more)


async def lock_of(conn: AsyncConnection, file: str) -> str:
    found = await dags.published_bundle(conn, "default", file)
    assert found is not None
    return contents(found.archive, found.hash)[LOCK_FILE].decode()


async def versions(conn: AsyncConnection) -> object:
    return await value(conn, "select count(*) from dag_version")


async def ended(conn: AsyncConnection, run_id: int) -> str:
    async def state() -> str | None:
        found = await run_state(conn, run_id)
        return found if found not in ("queued", "running") else None

    last: str = await eventually(state, 60)
    return last


async def test_two_dags_of_a_folder_run_with_different_versions_of_a_package(
    conn: AsyncConnection,
    database: str,
    publisher: Callable[..., Publisher],
    folder: Path,
    tmp_path: Path,
    wheels: Path,
) -> None:
    write(folder, "old", "alpha<2")
    write(folder, "new", "alpha>=2")
    await publisher().tick()
    assert await dags.import_errors(conn) == []
    # Another machine, which has only the database.
    settings = quick(database, tmp_path / "elsewhere")
    runner = Runner(settings, url=database, log=Said().log, environment=from_folder(wheels))
    runs = {name: await start(conn, name) for name in ("old", "new")}
    async with hosted(runner):
        assert [await ended(conn, run_id) for run_id in runs.values()] == ["success", "success"]
        # Their fork servers keep the environments.
        built = [settings.environments_folder / info.name for info in Environments(settings).all()]
        assert [cache.remove(place, -1.0) for place in built] == [False, False]
        shutil.rmtree(settings.environments_folder)  # somebody needed the space
        runs["new"] = await start(conn, "new")
        assert await ended(conn, runs["new"]) == "success"
    rows = await conn.execute("select run_id, value from result where idx = 0 and run_id = any(%s)", [[*runs.values()]])
    assert dict(await rows.fetchall()) == {runs["old"]: "1.0", runs["new"]: "2.0"}


async def test_a_version_keeps_its_packages_until_their_declaration_changes(
    conn: AsyncConnection, publisher: Callable[..., Publisher], folder: Path, wheels: Path
) -> None:
    write(folder, "etl", "alpha")
    await publisher().tick()
    first = await lock_of(conn, "etl.py")
    assert "alpha==2.0" in first
    # A release of the package, and a publisher that starts on an empty machine.
    make_wheel(wheels, "alpha", "3.0")
    other = publisher()
    await other.tick()
    assert await versions(conn) == 1
    write(folder, "etl", "alpha", more="\nVALUE = 1\n")
    await other.tick()
    assert await versions(conn) == 2
    assert await lock_of(conn, "etl.py") == first
    write(folder, "etl", "alpha>=1")
    await other.tick()
    assert "alpha==3.0" in await lock_of(conn, "etl.py")


async def test_packages_that_cannot_be_resolved_are_an_import_error_and_the_last_version_stays(
    conn: AsyncConnection,
    publisher: Callable[..., Publisher],
    folder: Path,
    wheels: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(folder, "etl", "alpha")
    said = Said()
    keeping = publisher(said)
    await keeping.tick()
    write(folder, "etl", "alpha==4.0")
    await keeping.tick()
    await keeping.tick()
    (error,) = await dags.import_errors(conn)
    assert (error.file, error.line) == ("etl.py", 2)
    assert "the dependencies in etl.py cannot be installed" in error.message
    assert "there is no version of alpha==4.0" in error.message
    assert len(said.events("dag_import_failed")) == 1
    assert await start(conn, "etl") > 0
    # It is tried again without a change of the file, and the same error is logged once.
    now = publishing.time.monotonic()
    monkeypatch.setattr(publishing.time, "monotonic", lambda: now)
    now += 6
    await keeping.tick()
    assert len(said.events("dag_import_failed")) == 1
    make_wheel(wheels, "alpha", "4.0")
    now += 11
    await keeping.tick()
    assert await dags.import_errors(conn) == []
    assert "alpha==4.0" in await lock_of(conn, "etl.py")


async def test_a_declaration_that_cannot_be_read_is_an_import_error_at_its_line(
    conn: AsyncConnection, publisher: Callable[..., Publisher], folder: Path
) -> None:
    (folder / "etl.py").write_text("from evertick import dag\n# /// script\n# dependencies = [\n# ///\n")
    await publisher().tick()
    (error,) = await dags.import_errors(conn)
    assert (error.file, error.line) == ("etl.py", 2)
    assert "not valid TOML" in error.message


async def test_a_build_delays_no_other_file(
    conn: AsyncConnection, publisher: Callable[..., Publisher], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "a_slow", "alpha")
    (folder / "quick.py").write_text(
        "from evertick import dag, task\n@task\ndef t(): ...\n@dag\ndef quick():\n    t()\n"
    )
    monkeypatch.setattr(publishing, "PATIENCE_SECONDS", 0.0)
    working = publisher()
    resolve = working._environments.resolve

    async def slow(declaration: Any) -> Any:
        await eventually(published)
        return await resolve(declaration)

    async def published() -> bool:
        return await dags.names(conn) == ["quick"]

    monkeypatch.setattr(working._environments, "resolve", slow)
    await working.tick()
    assert await dags.names(conn) == ["a_slow", "quick"]


async def test_a_runner_that_cannot_build_returns_the_task_and_another_one_runs_it(
    conn: AsyncConnection,
    database: str,
    publisher: Callable[..., Publisher],
    folder: Path,
    tmp_path: Path,
    wheels: Path,
) -> None:
    write(folder, "etl", "alpha")
    await publisher().tick()
    run_id, said = await start(conn, "etl"), Said()
    settings = quick(database, tmp_path / "cut-off")
    unlucky = uv_environment(UV_DEFAULT_INDEX="http://127.0.0.1:1/simple")
    shutil.move(wheels, tmp_path / "moved")
    async with hosted(Runner(settings, url=database, log=said.log, environment=unlucky)):
        await said.saw("task_finished", outcome="given_back")
    row = await conn.execute(
        "select state::text, attempt, lost_attempts, not_before > clock() + interval '3 seconds', reason from task"
        " where run_id = %s and idx = 0",
        [run_id],
    )
    state, attempt, lost, is_later, reason = await row.fetchone() or ()
    assert (state, attempt, lost, is_later) == ("pending", 0, 0, True)
    assert str(reason).startswith("environment_failed: its Python environment cannot be built on this machine: ")
    shutil.move(tmp_path / "moved", wheels)
    await conn.execute("update task_timer set due_at = clock()")
    await conn.execute("update task set not_before = w.due_at from task_timer w where w.run_id = task.run_id")
    lucky = Runner(quick(database, tmp_path / "lucky"), url=database, log=Said().log, environment=from_folder(wheels))
    scheduler = Scheduler(quick(database, tmp_path / "home"), url=database, log=Said().log, owner="test")
    async with hosted(scheduler), hosted(lucky):
        assert await ended(conn, run_id) == "success"
    outcomes = await conn.execute("select outcome::text, attempt from attempt where run_id = %s", [run_id])
    assert await outcomes.fetchall() == [("given_back", 1)]


async def test_a_build_that_never_succeeds_fails_the_task_in_the_end(
    conn: AsyncConnection,
    database: str,
    publisher: Callable[..., Publisher],
    folder: Path,
    tmp_path: Path,
    wheels: Path,
) -> None:
    write(folder, "etl", "alpha")
    await publisher().tick()
    shutil.rmtree(wheels)
    settings = quick(database, tmp_path / "elsewhere", environment_retry_seconds=0.0, infra_retries=0)
    run_id = await start(conn, "etl")
    async with hosted(Runner(settings, url=database, log=Said().log, environment=from_folder(wheels))):
        assert await ended(conn, run_id) == "failed"
    reason = await value(conn, "select reason from task where idx = 0")
    assert str(reason).startswith("environment_failed: ")
