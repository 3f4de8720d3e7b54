"""The package as an index would have it: what is in it, what it says of itself, and that it works without this clone.

`make package-test` also installs it into an empty environment and starts it there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from tools.package import build

from evertick.release import commit
from tests.source_tree import ROOT, SOURCE

NAME = "evertick-0.1.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("package") / "dist")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())


def test_the_wheel_has_every_file_of_the_source_the_commit_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        assert archive.read("evertick/commit.txt").decode().strip() == commit()
    files = {f"evertick/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert packed == expected | {"evertick/commit.txt"}


def test_the_source_distribution_builds_without_the_clone(wheel: Path) -> None:
    """The wheel was built from it. It has no tests, which need the clone."""
    with tarfile.open(wheel.with_name(f"{NAME}.tar.gz")) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "src/evertick/commit.txt"} <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "bench", "docs", "."))]


def test_the_metadata_is_what_an_index_shows(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["License-Expression"], found["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert {"LICENSE", "src/evertick/ui/static/vendor/htmx.LICENSE"} == set(found.get_all("License-File", []))
    assert {each.partition(",")[0] for each in found.get_all("Project-URL", [])} >= {"Documentation", "Changelog"}
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    with zipfile.ZipFile(wheel) as archive:
        assert "evertick = evertick.cli.main:main" in archive.read(f"{NAME}.dist-info/entry_points.txt").decode()


def test_every_dependency_has_a_floor_and_none_has_a_ceiling(wheel: Path) -> None:
    """A ceiling, or a tool for development, would make Evertick collide with the packages of a DAG."""
    wanted = metadata(wheel).get_all("Requires-Dist", [])
    assert [each for each in wanted if not re.match(r"[a-z0-9-]+(\[\w+\])?>=[\d.]+(; extra == \"\w+\")?$", each)] == []
    assert not {"pytest", "ruff", "mypy"} & {re.split(r"\W", each)[0] for each in wanted}


WORK = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
import evertick
from evertick.cli.commands.up import put_examples
from evertick.cli.main import main
print(evertick.__file__, len(put_examples(Path("dags"))), put_examples(Path("empty"), are_wanted=False))
sys.exit(main(["--version"]) or main(["dags", "validate", "dags"]))
"""


def test_the_unpacked_wheel_works_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "work"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    empty.mkdir()
    command = [sys.executable, "-I", "-c", WORK, str(installed)]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{installed}/evertick/__init__.py ")
    assert f"evertick 0.1.0 ({commit()})" in done.stdout
    assert re.search(r"(\d+) \[\]", done.stdout.splitlines()[0])


def test_the_version_is_written_in_one_place() -> None:
    again = [
        str(path.relative_to(ROOT))
        for path in SOURCE.rglob("*.py")
        if re.search(r"__version__\s*=|['\"]0\.1\.0['\"]", path.read_text(encoding="utf-8"))
    ]
    assert again == []
