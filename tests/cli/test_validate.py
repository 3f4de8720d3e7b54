"""`evertick dags validate`: DAG files without a database."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli

GOOD = """
from evertick import dag, task

@task
def extract():
    return 1

@task
def load(rows):
    pass

@dag(schedule="@daily")
def etl():
    load(extract())
"""
BROKEN = "from evertick import dag\n\nimport no_such_module\n"


async def test_a_good_file_shows_its_dags_and_tasks(cli_without_database: Cli, nowhere: Path) -> None:
    (nowhere / "good.py").write_text(GOOD)
    ran = await cli_without_database("dags", "validate", "good.py")
    assert ran.status == 0, ran
    assert "ok good.py: etl, 2 tasks, cron @daily (UTC)" in ran.out
    assert "load  after extract" in ran.out
    (file,) = (await cli_without_database.json("dags", "validate", "good.py"))["files"]
    assert file["error"] is None
    assert file["dags"][0]["tasks"][1] == {"task": "load", "upstream": ["extract"]}


async def test_a_broken_file_is_told_with_its_line(cli_without_database: Cli, nowhere: Path) -> None:
    (nowhere / "broken.py").write_text(BROKEN)
    ran = await cli_without_database("dags", "validate", "broken.py")
    assert ran.status == 2
    assert "broken.py:3: ModuleNotFoundError: No module named 'no_such_module'" in ran.out
    answer = await cli_without_database("dags", "validate", "broken.py", "--json")
    assert (answer.status, answer.json["files"][0]["error"]["line"]) == (2, 3)


async def test_a_folder_is_checked_whole_and_names_are_unique_in_it(cli_without_database: Cli, nowhere: Path) -> None:
    folder = nowhere / "dags"
    folder.mkdir()
    (folder / "one.py").write_text(GOOD)
    (folder / "two.py").write_text(GOOD)
    (folder / "broken.py").write_text(BROKEN)
    ran = await cli_without_database("dags", "validate", "dags")
    assert ran.status == 2
    assert "ok one.py: etl" in ran.out
    assert "broken.py:3" in ran.out
    assert "DAG etl is defined in more than one file: one.py, two.py" in ran.out


async def test_a_file_in_the_dags_folder_may_import_its_neighbours(cli_without_database: Cli, nowhere: Path) -> None:
    (nowhere / "dags" / "team").mkdir(parents=True)
    (nowhere / "dags" / "shared.py").write_text("NAME = 'etl'\n")
    (nowhere / "dags" / "team" / "etl.py").write_text("from shared import NAME\n" + GOOD)
    ran = await cli_without_database("dags", "validate", "dags/team/etl.py")
    assert ran.status == 0, ran


async def test_what_is_no_dag_file_is_refused(cli_without_database: Cli, nowhere: Path) -> None:
    (nowhere / "plain.py").write_text("import evertick\n")
    (nowhere / "notes.txt").write_text("dag evertick")
    (nowhere / "empty").mkdir()
    ran = await cli_without_database("dags", "validate", "plain.py")
    assert (ran.status, "it defines no DAG" in ran.out) == (2, True)
    assert "not a Python file" in await cli_without_database.refused("dags", "validate", "notes.txt")
    assert "holds no DAG file" in await cli_without_database.refused("dags", "validate", "empty")
    assert "There is no file or folder gone.py" in await cli_without_database.refused("dags", "validate", "gone.py")
