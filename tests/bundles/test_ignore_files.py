"""`.airflowignore` excludes the files that it excludes under Airflow, in both syntaxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertick.bundles.ignore_files import without_ignored
from evertick.domain.errors import UserError

FILES = ["a.py", "lib/b.py", "lib/keep.py", "lib/deep/c.py", "project_a/dag.py", "project_a/tests/t.py", "old_1.py"]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("old_?.py", ["a.py", "lib/b.py", "lib/keep.py", "lib/deep/c.py", "project_a/dag.py", "project_a/tests/t.py"]),
        ("tests/\n/a.py\n# a.py", ["lib/b.py", "lib/keep.py", "lib/deep/c.py", "project_a/dag.py", "old_1.py"]),
        ("lib/*.py\n!lib/keep.py", ["a.py", "lib/keep.py", "lib/deep/c.py", *FILES[4:]]),
        ("lib\n!lib/keep.py", ["a.py", *FILES[4:]]),
        ("**/deep/**\n*_a/*.py", ["a.py", "lib/b.py", "lib/keep.py", "project_a/tests/t.py", "old_1.py"]),
        ("[ao]*.py", [*FILES[1:6]]),
    ],
)
def test_glob(tmp_path: Path, pattern: str, kept: list[str]) -> None:
    (tmp_path / ".airflowignore").write_text(pattern)
    assert without_ignored(tmp_path, FILES, "glob") == kept


def test_a_file_in_a_folder_counts_there_and_expressions_are_searched(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / ".airflowignore").write_text("*.py\n!deep/*.py")
    assert without_ignored(tmp_path, FILES, "glob") == ["a.py", "lib/deep/c.py", *FILES[4:]]
    (tmp_path / "lib" / ".airflowignore").unlink()
    (tmp_path / ".airflowignore").write_text("project_a  # all of it\n^old_[0-9]")
    assert without_ignored(tmp_path, FILES, "regexp") == FILES[:4]
    (tmp_path / ".airflowignore").write_text("(")
    with pytest.raises(UserError, match=r"'\(' is no pattern"):
        without_ignored(tmp_path, FILES, "regexp")
