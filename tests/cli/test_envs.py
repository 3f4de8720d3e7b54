"""`evertick envs`, and the commands that load DAG files with packages of their own."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.bundles.package_index import from_folder, make_wheel
from tests.cli.conftest import Cli

DAG = """# /// script
# dependencies = ["alpha{limit}"]
# ///
import alpha
from evertick import Param, dag, task

@task
def version(n: int) -> str:
    return alpha.VERSION * n

@dag
def {name}(n: int = Param(1, maximum=3)):
    version(n)
"""


@pytest.fixture
def folder(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in from_folder(nowhere / "wheels").items():
        monkeypatch.setenv(name, text)
    for number in (1, 2):
        make_wheel(nowhere / "wheels", "alpha", f"{number}.0")
    folder = nowhere / "dags"
    folder.mkdir()
    (folder / "old.py").write_text(DAG.format(limit="<2", name="old"))
    (folder / "new.py").write_text(DAG.format(limit="", name="new"))
    return folder


async def test_environments_are_built_listed_and_pruned(cli_without_database: Cli, folder: Path) -> None:
    cli = cli_without_database
    assert "No environments yet" in (await cli("envs", "list")).out
    built = (await cli.json("envs", "build", folder))["environments"]
    assert [(each["files"], each["is_new"], each["problem"]) for each in built] == [
        (["new.py"], True, None),
        (["old.py"], True, None),
    ]
    again = await cli("envs", "build", folder / "old.py")
    assert again.out.splitlines() == [f"ok old.py: {built[1]['name'][:12]} exists"]
    listed = await cli.json("envs", "list")
    assert sorted(each["packages"] for each in listed["environments"]) == [["alpha 1.0"], ["alpha 2.0"]]
    assert 0 < sum(each["bytes"] for each in listed["environments"]) < listed["total_bytes"] < listed["max_bytes"]
    assert "alpha 1.0" in (await cli("envs", "list")).out
    place = folder.parent / ".evertick" / "envs" / built[0]["name"]
    os.utime(place, (0, time.time() - 3 * 86_400))
    assert (await cli.json("envs", "prune"))["removed"] == []
    assert (await cli.json("envs", "prune", "--unused", "2d"))["removed"] == [built[0]["name"]]
    assert "Removed 0 environments" in (await cli("envs", "prune", "--unused", "0s")).out


async def test_an_environment_that_cannot_be_built_is_a_failure_that_names_the_file(
    cli_without_database: Cli, folder: Path
) -> None:
    (folder / "old.py").write_text(DAG.format(limit="<1", name="old"))
    ran = await cli_without_database("envs", "build", folder)
    assert ran.status == 1
    assert re.search(r"failed old\.py: (× )?No solution found", ran.out)
    assert "ok new.py: " in ran.out
    assert "There is no file or folder nothing.py" in await cli_without_database.refused("envs", "build", "nothing.py")


async def test_a_dag_is_validated_and_tried_out_in_its_environment(cli_without_database: Cli, folder: Path) -> None:
    cli = cli_without_database
    ran = await cli("dags", "validate", folder)
    assert (ran.status, "ok new.py: new, 1 task" in ran.out, "ok old.py: old, 1 task" in ran.out) == (0, True, True)
    ran = await cli("dags", "test", "old", "--param", "n=2")
    assert (ran.status, ran.out.splitlines()[-1]) == (0, "old: success")
    assert "param 'n' is 4" in await cli.refused("dags", "test", "old", "--param", "n=4")


async def test_a_deployment_keeps_its_packages_until_their_declaration_changes(cli: Cli, folder: Path) -> None:
    first = await cli.json("deploy", folder)
    assert [each["is_new"] for each in first["dags"]] == [True, True]
    make_wheel(folder.parent / "wheels", "alpha", "3.0")
    again = await cli.json("deploy", folder)
    assert [(each["is_new"], each["bundle"]) for each in again["dags"]] == [
        (False, each["bundle"]) for each in first["dags"]
    ]
    built = (await cli.json("envs", "build"))["environments"]
    assert [(each["files"], each["is_new"]) for each in built] == [(["dags/new.py"], False), (["dags/old.py"], False)]
