"""The named SQL statements of `queries/<noun>.sql`: their text, and how their rows become records.

A statement starts at `-- name: claim_batch`; the comment lines below it give the reason for its form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.rows import AsyncRowFactory, RowMaker, class_row

SQL_DIRECTORY = Path(__file__).with_name("queries")


_NAME = re.compile(r"^--\s*name:\s*(\w+)\s*$")


def sql(noun: str, name: str) -> LiteralString:
    """The statement `name` of `queries/<noun>.sql`."""
    known = statements(noun)
    if name not in known:
        raise LookupError(f"queries/{noun}.sql has no statement {name!r}; it has: {', '.join(sorted(known)) or 'none'}")
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


T = TypeVar("T")


Params = Mapping[str, object]


class _Json(Loader):
    """Like psycopg's own loader, in a fifth of the time for an empty object: most params are empty, and every run row has some."""

    def load(self, data: Buffer) -> Any:
        # `json.loads` would detect the encoding of bytes first.
        text = str(data, "utf-8")
        return {} if text == "{}" else json.loads(text)


# How values are decoded on all our connections.
VALUES = AdaptersMap(psycopg.adapters)


VALUES.register_loader("json", _Json)


VALUES.register_loader("jsonb", _Json)


def record_row(record: type[T]) -> AsyncRowFactory[T]:
    """Like psycopg's `class_row`, in half the time if the columns are in field order: it builds no dictionary per row."""
    named: AsyncRowFactory[T] = class_row(record)
    expected = [name.encode() for name in getattr(record, "__match_args__", ())]

    def make(cursor: AsyncCursor[Any]) -> RowMaker[T]:
        result = cursor.pgresult
        if result is None or [result.fname(number) for number in range(result.nfields)] != expected:
            return named(cursor)

        def in_order(values: Sequence[Any]) -> T:
            return record(*values)

        return in_order

    return make


async def all_rows(conn: AsyncConnection, statement: LiteralString, params: Params, record: type[T]) -> list[T]:
    async with conn.cursor(row_factory=record_row(record)) as cursor:
        await cursor.execute(statement, params)
        return await cursor.fetchall()


async def one_row(conn: AsyncConnection, statement: LiteralString, params: Params, record: type[T]) -> T | None:
    async with conn.cursor(row_factory=record_row(record)) as cursor:
        await cursor.execute(statement, params)
        return await cursor.fetchone()


async def one_value(conn: AsyncConnection, statement: LiteralString, params: Params) -> Any:
    """The first column of the first row. The caller states its type, which the statement determines."""
    cursor = await conn.execute(statement, params)
    row = await cursor.fetchone()
    return None if row is None else row[0]
