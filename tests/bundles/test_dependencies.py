"""Which declaration of dependencies counts for a DAG file, and what its lock contains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evertick.bundles.bundle import pack, unpack
from evertick.bundles.dependencies import Declaration, bundle_lock, find_declaration, make_lock, read_lock
from evertick.domain.errors import InvalidDag

BLOCK = '# /// script\n# requires-python = ">=3.12"\n# dependencies = ["a"]\n# ///\n'
PROJECT = '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["b"]\n'


def declared(folder: Path, file: str) -> Declaration:
    found = find_declaration(folder, file)
    assert found is not None
    return found


def source(folder: Path, file: str) -> str | None:
    found = find_declaration(folder, file)
    return None if found is None else found.source.relative_to(folder).as_posix()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_nearest_declaration_counts_and_none_above_the_dags_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    write(folder, team__sub__x_py="", team__y_py="", z_py="")
    write(tmp_path, requirements_txt="outside")
    assert source(folder, "z.py") is None
    write(folder, requirements_txt="a")
    assert source(folder, "team/sub/x.py") == "requirements.txt"
    write(folder, pyproject_toml=PROJECT)
    assert source(folder, "team/sub/x.py") == source(folder, "z.py") == "pyproject.toml"
    write(folder, team__requirements_txt="a")
    assert source(folder, "team/sub/x.py") == source(folder, "team/y.py") == "team/requirements.txt"
    write(folder, team__sub__x_py=f'"""Text."""\n{BLOCK}import a\n')
    assert source(folder, "team/sub/x.py") == "team/sub/x.py"
    found = declared(folder, "team/sub/x.py")
    assert (found.line, found.requires_python) == (2, ">=3.12")


@pytest.mark.parametrize("text", ["[tool.ruff]\nline-length = 80\n", '[project]\nname = "x"\nversion = "1"\n'])
def test_a_project_file_that_lists_no_dependencies_declares_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, x_py="", pyproject_toml=text)
    assert source(tmp_path, "x.py") is None


def test_an_empty_list_is_a_declaration(tmp_path: Path) -> None:
    write(tmp_path, x_py="# /// script\n# dependencies = []\n# ///\n")
    assert source(tmp_path, "x.py") == "x.py"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (f"import os\n{BLOCK}\n{BLOCK}", 7, "two blocks"),
        ("\n# /// script\n# dependencies = [a]\n# ///\n", 2, "not valid TOML"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    write(tmp_path, x_py=text)
    with pytest.raises(InvalidDag, match=message) as refused:
        find_declaration(tmp_path, "x.py")
    assert refused.value.line == line


def test_a_change_of_an_included_file_or_of_a_lock_file_is_a_change_of_the_declaration(tmp_path: Path) -> None:
    write(tmp_path, x_py="", requirements_txt="-r base.txt\n-c limits.txt\n", base_txt="a\n")
    digests = [declared(tmp_path, "x.py").digest]
    write(tmp_path, base_txt="a==2\n")
    digests.append(declared(tmp_path, "x.py").digest)
    write(tmp_path, limits_txt="a<3\n")
    digests.append(declared(tmp_path, "x.py").digest)
    write(tmp_path, x_py=BLOCK)
    digests.append(declared(tmp_path, "x.py").digest)
    write(tmp_path, x_py=BLOCK + "CODE = 1\n")
    assert declared(tmp_path, "x.py").digest == digests[-1]
    write(tmp_path, x_py_lock="locked")
    assert declared(tmp_path, "x.py").lock == tmp_path / "x.py.lock"
    digests.append(declared(tmp_path, "x.py").digest)
    assert len(set(digests)) == len(digests)


def test_a_lock_contains_no_credentials_and_no_relative_path(tmp_path: Path) -> None:
    write(tmp_path, x_py=BLOCK)
    resolved = (
        "--index-url https://joe:secret@packages.example/simple\n--extra-index-url https://token@other.example/simple\n"
        "--find-links ./wheels\n--find-links https://u:p@files.example/\na==1 \\\n    --hash=sha256:00\n"
    )
    lock = make_lock(declared(tmp_path, "x.py"), python="3.12", resolved=resolved)
    assert not re.search("joe|secret|token|u:p", lock.text)
    assert lock.requirements.splitlines() == [
        "--index-url https://packages.example/simple",
        "--extra-index-url https://other.example/simple",
        f"--find-links {tmp_path}/wheels",
        "--find-links https://files.example/",
        "a==1 \\",
        "    --hash=sha256:00",
    ]
    assert read_lock(lock.text) == lock


def test_the_default_index_is_that_of_each_machine(tmp_path: Path) -> None:
    write(tmp_path, x_py=BLOCK)
    lock = make_lock(
        declared(tmp_path, "x.py"),
        python="3.12",
        resolved="--index-url https://default.example/simple\n\na==1\n",
        default_index="--index-url https://default.example/simple",
    )
    assert lock.requirements == "a==1\n"


def test_files_with_the_same_packages_and_python_share_an_environment(tmp_path: Path) -> None:
    write(tmp_path, x_py=BLOCK, y_py="", requirements_txt="a")
    x, y = declared(tmp_path, "x.py"), declared(tmp_path, "y.py")
    keys = [make_lock(each, python="3.12", resolved="a==1\n").key for each in (x, y)]
    assert keys[0] == keys[1]
    assert keys[0] != make_lock(x, python="3.13", resolved="a==1\n").key
    assert keys[0] != make_lock(x, python="3.12", resolved="a==2\n").key


def test_the_lock_is_part_of_the_bundle_and_of_its_hash(tmp_path: Path) -> None:
    folder = tmp_path / "dags"
    write(folder, x_py=BLOCK)
    locks = [make_lock(declared(folder, "x.py"), python="3.12", resolved=f"a=={n}\n") for n in (1, 2)]
    bundles = [pack(folder, "x.py", ["x.py"], lock) for lock in (None, *locks)]
    assert len({bundle.hash for bundle in bundles}) == 3
    places = [unpack(bundle.archive, bundle.hash, tmp_path / "home") for bundle in bundles]
    assert [bundle_lock(place) for place in places] == [None, *locks]


def test_a_damaged_lock_is_refused() -> None:
    with pytest.raises(InvalidDag, match="Publish the DAG file again"):
        read_lock("a==1\n")
