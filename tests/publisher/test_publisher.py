"""The publisher keeps the database in step with a folder: new, changed, broken, gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import dags
from evertick.observability.logging import configure
from evertick.publisher.publisher import Publisher, find_dag_files
from tests.engine.world import start, value
from tests.waiting import eventually

DAG = """
from evertick import dag, task
import {module}

@task
def work():
    return {module}.VALUE

@dag(schedule="{schedule}")
def {name}():
    work()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "dags"
    made.mkdir()
    (made / "shared_values.py").write_text("VALUE = 1\n")
    return made


@pytest.fixture
def write(folder: Path) -> Callable[..., None]:
    def make(file: str, name: str, schedule: str = "@every 1h") -> None:
        (folder / file).write_text(DAG.format(name=name, schedule=schedule, module="shared_values"))

    return make


@pytest.fixture
async def publisher(database: str, folder: Path, tmp_path: Path) -> Publisher:
    settings = Settings(dags_folder=folder, home=tmp_path / "home", listen_notify=False)
    log = configure(service="publisher", as_json=True, stream=(tmp_path / "log").open("w"))
    return Publisher(settings, url=database, environment={"PATH": "/usr/bin"}, log=log)


async def names(conn: AsyncConnection) -> list[str]:
    return await dags.names(conn)


async def test_a_folder_of_dags_is_published_and_stays_one_version(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None]
) -> None:
    write("one.py", "first")
    write("two.py", "second")
    for _ in range(3):
        await publisher.tick()
    assert await names(conn) == ["first", "second"]
    assert await value(conn, "select count(*) from dag_version") == 2


async def test_changed_code_is_a_new_version_of_the_dags_that_use_it(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None], folder: Path
) -> None:
    write("one.py", "first")
    (folder / "other.py").write_text(
        "from evertick import dag, task\n@task\ndef t(): ...\n@dag\ndef other():\n    t()\n"
    )
    await publisher.tick()
    (folder / "shared_values.py").write_text("VALUE = 2222\n")
    await publisher.tick()
    cursor = await conn.execute(
        "select d.name, max(v.number) from dag d join dag_version v using (dag_id) group by 1 order by 1"
    )
    assert await cursor.fetchall() == [("first", 2), ("other", 1)]


async def test_a_broken_file_is_an_error_that_people_see_and_its_last_version_stays(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None], folder: Path
) -> None:
    write("one.py", "first")
    await publisher.tick()
    good = (folder / "one.py").read_text()
    (folder / "one.py").write_text(good + "\nraise ValueError('half written')  # dag evertick\n")
    await publisher.tick()
    (error,) = await dags.import_errors(conn)
    assert (error.file, error.line) == ("one.py", len(good.splitlines()) + 2)
    assert "half written" in error.message
    assert await names(conn) == ["first"]
    assert await start(conn, "first") > 0
    (folder / "one.py").write_text(good)
    await publisher.tick()
    assert await dags.import_errors(conn) == []


async def test_a_file_that_imports_an_airflow_name_is_an_error_with_the_name_to_use(
    conn: AsyncConnection, publisher: Publisher, folder: Path, tmp_path: Path
) -> None:
    (folder / "habit.py").write_text("from evertick import DAG\n")
    await publisher.tick()
    (error,) = await dags.import_errors(conn)
    assert (error.file, error.line) == ("habit.py", 1)
    assert "use the decorator @dag" in error.message
    (folder / "habit.py").write_text("import os\nos._exit(3)  # evertick, dag\n")
    await publisher.tick()
    assert "line=None" not in (tmp_path / "log").read_text()
    assert '"line": null' not in (tmp_path / "log").read_text()


CHANGES = """
from pathlib import Path
from evertick import dag, task
import helper

# What another program does while this file is loaded for the first time.
for name, old, new in (("changes.py", "def " + "before", "def " + "after"), ("helper.py", "VALUE = 1", "VALUE = 2")):
    path = Path({folder!r}, name)
    if name == {changed!r} and new not in path.read_text():
        draft = path.with_suffix(".draft")
        draft.write_text(path.read_text().replace(old, new))
        draft.replace(path)

@task
def work(): ...

@dag(description=str(helper.VALUE))
def before():
    work()
"""


@pytest.mark.parametrize(("changed", "expected"), [("changes.py", ("after", "1")), ("helper.py", ("before", "2"))])
async def test_a_file_that_changes_while_it_is_loaded_first_is_loaded_again(
    conn: AsyncConnection, publisher: Publisher, folder: Path, changed: str, expected: tuple[str, str]
) -> None:
    """Otherwise the plan of the old file would be published with the code of the new one, and stay."""
    (folder / "helper.py").write_text("VALUE = 1\n")
    (folder / "changes.py").write_text(CHANGES.format(folder=str(folder), changed=changed))
    for _ in range(2):
        await publisher.tick()
    published = "select d.name, v.spec->>'description' from dag d join dag_version v using (version_id)"
    assert await (await conn.execute(published)).fetchall() == [expected]


async def test_a_bad_schedule_is_refused_with_its_name(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None]
) -> None:
    write("one.py", "first", schedule="99 * * * *")
    await publisher.tick()
    (error,) = await dags.import_errors(conn)
    assert "99 * * * *" in error.message
    assert await names(conn) == []


async def test_only_a_scan_that_finds_the_file_gone_removes_its_dags(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None], folder: Path
) -> None:
    write("one.py", "first")
    write("two.py", "second")
    await publisher.tick()
    (folder / "two.py").unlink()
    await publisher.tick()
    assert await names(conn) == ["first"]
    away = folder.with_name("away")
    folder.rename(away)
    await publisher.tick()
    assert await names(conn) == ["first"]
    away.rename(folder)
    await publisher.tick()
    assert await names(conn) == ["first"]


async def test_a_dag_taken_out_of_its_file_is_removed_and_comes_back(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None]
) -> None:
    write("one.py", "first")
    await publisher.tick()
    write("one.py", "renamed")
    await publisher.tick()
    assert await names(conn) == ["renamed"]
    write("one.py", "first")
    await publisher.tick()
    assert await names(conn) == ["first"]
    assert await value(conn, "select count(*) from dag where name = 'first'") == 1


async def test_two_files_with_one_dag_name_are_told_apart(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None]
) -> None:
    write("a.py", "same")
    write("b.py", "same")
    await publisher.tick()
    (error,) = await dags.import_errors(conn)
    assert error.file == "b.py"
    assert "already defined in a.py" in error.message


async def test_a_file_that_hangs_delays_no_other_and_is_loaded_again_when_it_changes(
    conn: AsyncConnection, publisher: Publisher, write: Callable[..., None], folder: Path, tmp_path: Path
) -> None:
    (folder / "a_hangs.py").write_text("import time\nfrom evertick import dag\ntime.sleep(1e6)\n")
    write("before.py", "before")
    ticking = asyncio.ensure_future(publisher.tick())

    async def is_published(*dags_expected: str) -> bool:
        return await names(conn) == list(dags_expected)

    await eventually(lambda: is_published("before"))
    write("new.py", "new")
    await eventually(lambda: is_published("before", "new"))
    assert not ticking.done()
    write("a_hangs.py", "fixed")
    await ticking
    assert await is_published("before", "fixed", "new")
    assert await dags.import_errors(conn) == []


async def test_an_error_without_a_line_is_logged_without_one(
    conn: AsyncConnection, database: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "bad.py").write_text("import os\nfrom evertick import dag\nos._exit(3)\n")
    settings = Settings(dags_folder=folder, home=tmp_path / "home", listen_notify=False)
    with (tmp_path / "text.log").open("w") as stream:
        log = configure(service="publisher", as_json=False, stream=stream)
        await Publisher(settings, url=database, environment={"PATH": "/usr/bin"}, log=log).tick()
    (error,) = await dags.import_errors(conn)
    assert error.line is None and "exited with code 3" in error.message
    told = (tmp_path / "text.log").read_text()
    assert "dag_import_failed" in told and "line=" not in told


async def test_dag_files_cannot_see_where_the_database_is(
    conn: AsyncConnection, publisher: Publisher, folder: Path
) -> None:
    (folder / "peek.py").write_text(
        "import os\nfrom evertick import dag, task\nseen = [k for k in os.environ if k.startswith('EVERTICK')]\n"
        "@task\ndef t(): ...\n@dag(description=f'{seen}')\ndef peek():\n    t()\n"
    )
    await publisher.tick()
    row = await dags.find(conn, "peek")
    assert row is not None and row.spec is not None and row.spec["description"] == "[]"


def test_files_that_cannot_hold_a_dag_are_not_loaded(folder: Path) -> None:
    (folder / "plain.py").write_text("x = 1\n")
    (folder / ".hidden.py").write_text("from evertick import dag\n")
    (folder / "real.py").write_text("from evertick import dag\n")
    (folder / "upper.py").write_text("from Evertick import DAG\n")
    assert find_dag_files(folder) == ["real.py", "upper.py"]


async def test_two_folders_are_two_deployments_and_leave_each_others_dags_alone(
    conn: AsyncConnection, database: str, tmp_path: Path
) -> None:
    publishers = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "same.py").write_text(
            f"from evertick import dag, task\n@task\ndef t(): ...\n@dag\ndef of_{name}():\n    t()\n"
        )
        settings = Settings(dags_folder=folder, home=tmp_path / "home", listen_notify=False, deployment=name)
        log = configure(service="publisher", as_json=True, stream=(tmp_path / "log").open("a"))
        publishers.append(Publisher(settings, url=database, environment={"PATH": "/usr/bin"}, log=log))
    for publisher in publishers * 2:
        await publisher.tick()
    assert await names(conn) == ["of_one", "of_two"]
    (tmp_path / "one/same.py").write_text("from evertick import dag\nraise ValueError('no')\n")
    await publishers[0].tick()
    await publishers[1].tick()
    (error,) = await dags.import_errors(conn)
    assert (error.deployment, error.file) == ("one", "same.py"), "the other's file of that name is fine"
    (tmp_path / "one/same.py").unlink()
    await publishers[0].tick()
    assert await names(conn) == ["of_two"]
    assert await dags.import_errors(conn) == []
