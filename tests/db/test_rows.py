"""Rows become records, whatever the order of the columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import LiteralString

import pytest
from psycopg import AsyncConnection

from evertick.db.statements import all_rows


@dataclass(frozen=True, slots=True)
class Pair:
    left: int
    right: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    left: int
    right: str


@pytest.mark.parametrize("record", [Pair, Named])
@pytest.mark.parametrize("columns", ["1 as left, 'b' as right", "'b' as right, 1 as left"])
async def test_a_column_is_the_field_of_its_name(conn: AsyncConnection, record: type[Pair], columns: str) -> None:
    assert await all_rows(conn, f"select {columns}", {}, record) == [record(left=1, right="b")]  # type: ignore[arg-type]
    assert await all_rows(conn, f"select {columns} where false", {}, record) == []  # type: ignore[arg-type]


async def test_what_is_not_asked_for_has_its_default_and_what_there_is_not_is_an_error(conn: AsyncConnection) -> None:
    assert await all_rows(conn, "select 1 as left", {}, Pair) == [Pair(1)]
    with pytest.raises(TypeError, match="middle"):
        await all_rows(conn, "select 1 as left, 'b' as middle", {}, Pair)


@pytest.mark.parametrize("kind", ["json", "jsonb"])
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        " { } ",
        "[]",
        "null",
        '""',
        '{"a": {}}',
        '{"größe": "💾\\u0000x"}',
        "12345678901234567890123",
        "1e-7",
        "true",
    ],
)
async def test_json_is_read_as_python_reads_it(conn: AsyncConnection, kind: LiteralString, text: str) -> None:
    if kind == "jsonb":
        text = text.replace("\\u0000", "")
    cursor = await conn.execute(f"select %s::{kind}, %s::{kind}", [text, text])
    first, second = await cursor.fetchone() or ((), ())
    assert first == second == json.loads(text)
    assert type(first) is type(json.loads(text))
    # Nobody's change is seen by another.
    assert first is not second or not isinstance(first, dict | list)
