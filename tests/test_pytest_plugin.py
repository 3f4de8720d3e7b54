"""The pytest plug-in in a project of its own, as pytest finds it: installed, by its entry point."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from evertick.config import user_environment

DAG = """
from evertick import Param, dag, task

@task
def add(rows: int) -> int:
    return rows + 1

@task
def refuse_many(rows: int) -> None:
    if rows > 10:
        raise ValueError("too many rows")

@dag(schedule="0 6 * * *", timezone="Europe/Berlin")
def etl(rows: int = Param(3)) -> None:
    refuse_many(add(rows))
"""
TESTS = """
import pytest
from etl import etl

def test_a_run(run_dag):
    assert run_dag(etl).results["add"] == 4
    with pytest.raises(ValueError, match="too many rows"):
        run_dag(etl, params={"rows": 10})
    assert run_dag(etl, params={"rows": 10}, raise_errors=False).state == "failed"

def test_a_schedule(simulate_schedule):
    assert simulate_schedule(etl, "2030-01-01", "2030-01-02").local_times == ["2030-01-01 06:00"]
"""
SERVER = """
import urllib.request
import pytest

def test_a_server(evertick_server):
    ran = evertick_server.run("etl", {"rows": 50})
    assert ran["state"] == "failed"
    assert [task["state"] for task in ran["tasks"]] == ["success", "failed"]
    assert urllib.request.urlopen(evertick_server.url + "/healthz").status == 200
    with pytest.raises(AssertionError, match="[Dd]id you mean 'etl'"):
        evertick_server.command("dags", "show", "elt")
"""
INI = "[pytest]\ntestpaths = tests dags\npythonpath = dags\nevertick_dags = dags\naddopts = -p no:cacheprovider\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for file, text in {
        "pytest.ini": INI,
        "dags/etl.py": DAG,
        "dags/helper.py": "x = 1\n",
        "tests/test_etl.py": TESTS,
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def run_pytest(project: Path, *options: str) -> tuple[int, str]:
    environment = {**user_environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    # Of the run of these tests.
    environment = {name: text for name, text in environment.items() if not name.startswith(("PYTEST", "COV"))}
    # Plug-ins of these tests that take half of the start.
    command = [sys.executable, "-m", "pytest", "-p", "no:schemathesis", "-p", "no:hypothesispytest", *options]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_fixtures_and_the_check_of_every_dag_file_work(project: Path) -> None:
    status, said = run_pytest(project, "-v")
    assert status == 0, said
    assert len(re.findall("PASSED", said)) == 3
    assert "dags/etl.py::loads" in said


def test_a_dag_file_that_does_not_load_fails_its_check_with_its_line(project: Path) -> None:
    (project / "dags" / "broken.py").write_text("from evertick import dag\n\nimport no_such_module\n")
    status, said = run_pytest(project, "dags")
    assert status == 1
    assert re.search(r"broken\.py:3: ModuleNotFoundError.*no_such_module", said), said
    assert "1 failed, 1 passed" in said
    assert "bundles/loader" not in said


def test_a_folder_that_pytest_would_not_visit_is_refused(project: Path) -> None:
    (project / "pytest.ini").write_text(INI.replace("tests dags", "tests"))
    status, said = run_pytest(project)
    assert (status, "which is not in testpaths: add it there" in said) == (4, True), said


def test_a_project_that_does_not_use_it_imports_nothing_of_it(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (project / "tests" / "test_etl.py").write_text(
        "import sys\ndef test_it():\n"
        "    ours = {name for name in sys.modules if name.split('.')[0] == 'evertick'}\n"
        "    assert ours == {'evertick', 'evertick.pytest_plugin'}\n"
    )
    status, said = run_pytest(project, "tests")
    assert status == 0, said


@pytest.mark.long
def test_a_server_runs_the_dags_of_the_project_with_its_own_database(project: Path) -> None:
    (project / "tests" / "test_server.py").write_text(SERVER)
    (project / "evertick.toml").write_text('database_url = "postgresql://production.example/evertick"\n')
    status, said = run_pytest(project, "tests/test_server.py")
    assert status == 0, said
    assert not [each for each in Path("/proc").iterdir() if each.name.isdigit() and _is_of(each, project)]


def _is_of(process: Path, project: Path) -> bool:
    try:
        return str(project) in (process / "environ").read_text(errors="replace")
    except OSError:
        return False
