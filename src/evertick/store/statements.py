"""The named SQL statements of `sql/<noun>.sql`: their names and text.

A statement starts at `-- name: claim_batch`; the comment lines below it give the reason for its form.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import LiteralString

SQL_DIRECTORY = Path(__file__).with_name("sql")

_NAME = re.compile(r"^--\s*name:\s*(\w+)\s*$")


def sql(noun: str, name: str) -> LiteralString:
    """The statement `name` of `sql/<noun>.sql`."""
    known = statements(noun)
    if name not in known:
        raise LookupError(f"sql/{noun}.sql has no statement {name!r}; it has: {', '.join(sorted(known)) or 'none'}")
    return known[name]


@cache
def statements(noun: str, directory: Path = SQL_DIRECTORY) -> dict[str, LiteralString]:
    """Every statement of one file, in the order of the file."""
    path = directory / f"{noun}.sql"
    if not path.is_file():
        known = ", ".join(nouns(directory)) or "none"
        raise LookupError(f"There is no {path.name} in {directory}; there is: {known}")
    return _split(path.read_text(encoding="utf-8"), path)


def nouns(directory: Path = SQL_DIRECTORY) -> list[str]:
    """The nouns that have a file of statements."""
    return sorted(path.stem for path in directory.glob("*.sql"))


def _split(text: str, path: Path) -> dict[str, LiteralString]:
    bodies: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := _NAME.match(line):
            if match[1] in bodies:
                raise LookupError(f"{path.name}:{number} names {match[1]!r} a second time")
            current = bodies[match[1]] = []
        elif line.lstrip().startswith("--") or not line.strip():
            # Comments are left out: psycopg would read a per cent sign in one as a parameter.
            continue
        elif current is None:
            raise LookupError(f"{path.name}:{number} comes before any '-- name:' line")
        else:
            current.append(line)
    if empty := [name for name, lines in bodies.items() if not lines]:
        raise LookupError(f"{path.name} has nothing under {', '.join(empty)}")
    return {name: "\n".join(lines).rstrip().rstrip(";") for name, lines in bodies.items()}
