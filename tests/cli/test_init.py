"""`evertick init`: the created project works, and nothing of an existing one is changed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from evertick.bundles.loader import load_file
from evertick.config import given_settings
from tests.cli.conftest import Cli
from tests.source_tree import SOURCE
from tests.test_pytest_plugin import run_pytest

FILES = {
    *("pyproject.toml", "dags/daily_report.py", "tests/test_daily_report.py", ".github/workflows/tests.yml"),
    *(".pre-commit-config.yaml", "AGENTS.md", ".gitignore"),
}


def files_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
async def test_the_tests_of_a_new_project_pass_also_in_parallel(cli_without_database: Cli, nowhere: Path) -> None:
    ran = await cli_without_database("init", "My Orders")
    project = nowhere / "My Orders"
    assert ran.status == 0, ran
    assert set(files_of(project)) == FILES
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "my-orders"
    status, said = run_pytest(project, "-n", "2")
    assert (status, "4 passed" in said) == (0, True), said


async def test_nothing_that_exists_is_changed_and_what_is_missing_is_added(
    cli_without_database: Cli, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"pyproject.toml": "[project]\nname = 'mine'\n", "AGENTS.md": "mine", ".gitignore": ""}
    for name, text in mine.items():
        (nowhere / name).write_text(text)
    ran = await cli_without_database("init")
    assert ran.status == 0, ran
    found = files_of(nowhere)
    assert set(found) == FILES
    assert {name: found[name] for name in mine} == mine
    assert "kept     AGENTS.md" in ran.out and "created  dags/daily_report.py" in ran.out
    assert 'evertick_dags = ["dags"]' in ran.out
    assert "created" not in (await cli_without_database("init", ".")).out
    assert files_of(nowhere) == found
    (nowhere / "file").write_text("")
    refused = await cli_without_database("init", "file")
    assert (refused.status, "file is not a folder" in refused.err) == (2, True), refused


def test_the_workflow_is_one_of_github() -> None:
    workflow = SOURCE / "cli" / "project" / "ci.yml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(workflow)]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0


async def test_every_file_of_the_project_is_valid(cli_without_database: Cli, nowhere: Path) -> None:
    await cli_without_database("init")
    assert given_settings({}) == {"dags_folder": (Path("dags"), "pyproject.toml")}
    (hook,) = yaml.safe_load((nowhere / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert (await cli_without_database(*hook["entry"].split()[1:])).status == 0
    (block,) = re.findall(r"^```python\n(.*?)^```$", (nowhere / "AGENTS.md").read_text(), re.MULTILINE | re.DOTALL)
    (nowhere / "rules.py").write_text(block)
    loaded = await load_file(nowhere, "rules.py")
    assert loaded.error is None
    assert [dag.name for dag in loaded.dags] == ["orders"]
