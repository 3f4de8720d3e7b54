"""`.airflowignore`: which files of a folder Airflow does not look at. Both of its syntaxes: `glob`, as of .gitignore, which is the
default of Airflow 3, and `regexp`, that of Airflow 2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from evertick.domain.errors import UserError

NAME = ".airflowignore"


class _Rule(NamedTuple):
    """`folder` is what paths are relative to."""

    pattern: re.Pattern[str]
    folder: PurePosixPath
    is_negated: bool = False
    is_folder_only: bool = False


def without_ignored(folder: Path, files: Iterable[str], syntax: str) -> list[str]:
    """The files, relative to `folder`, that no `.airflowignore` in it excludes. Raises UserError for a bad pattern."""
    rules = [
        rule
        for path in sorted(folder.rglob(NAME))
        for rule in _rules(path, PurePosixPath(path.parent.relative_to(folder).as_posix()), syntax)
    ]
    return [file for file in files if not _is_ignored(PurePosixPath(file), rules)]


def _rules(path: Path, folder: PurePosixPath, syntax: str) -> list[_Rule]:
    made = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        text = line.strip()
        if syntax == "regexp":
            text = re.sub(r"\s*#.*", "", text)
        if not text or text.startswith("#"):
            continue
        try:
            made.append(_regexp(text) if syntax == "regexp" else _glob(text, folder))
        except re.error as error:
            raise UserError(f"{path}: {line.strip()!r} is no pattern of the syntax {syntax!r}: {error}") from None
    return made


def _regexp(text: str) -> _Rule:
    """Searched in the path below the DAGs folder, wherever the file with the pattern is."""
    return _Rule(re.compile(text), PurePosixPath())


def _glob(text: str, folder: PurePosixPath) -> _Rule:
    is_negated, text = text.startswith("!"), text.removeprefix("!")
    is_folder_only, text = text.endswith("/"), text.rstrip("/")
    is_anchored, text = "/" in text, text.lstrip("/")
    pattern = r"\A" if is_anchored else r"\A(?:.*/)?"
    parts = re.split(r"(\*\*/|/\*\*|\*|\?|\[[^]]+\])", text)
    meaning = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
    for part in parts:
        if part.startswith("[") and part.endswith("]"):
            pattern += part.replace("[!", "[^", 1)
        else:
            pattern += meaning.get(part) or re.escape(part)
    return _Rule(re.compile(pattern + r"\Z"), folder, is_negated, is_folder_only)


def _is_ignored(file: PurePosixPath, rules: list[_Rule]) -> bool:
    """A folder that is ignored is not entered, so nothing in it can be included again."""
    return any(_decide(path, path == file, rules) for path in [*reversed(file.parents), file][1:])


def _decide(path: PurePosixPath, is_file: bool, rules: list[_Rule]) -> bool:
    """The last pattern that matches decides."""
    is_ignored = False
    for rule in rules:
        is_meant = rule.folder in path.parents and not (rule.is_folder_only and is_file)
        if is_meant and rule.pattern.search(str(path.relative_to(rule.folder))):
            is_ignored = not rule.is_negated
    return is_ignored
