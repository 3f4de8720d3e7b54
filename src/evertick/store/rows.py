"""How rows become records: one cursor per question, typed by the record that the caller names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString, TypeVar

from psycopg import AsyncConnection
from psycopg.rows import class_row

T = TypeVar("T")
Params = Mapping[str, object]


async def all_rows(conn: AsyncConnection, statement: LiteralString, params: Params, record: type[T]) -> list[T]:
    async with conn.cursor(row_factory=class_row(record)) as cursor:
        await cursor.execute(statement, params)
        return await cursor.fetchall()


async def one_row(conn: AsyncConnection, statement: LiteralString, params: Params, record: type[T]) -> T | None:
    async with conn.cursor(row_factory=class_row(record)) as cursor:
        await cursor.execute(statement, params)
        return await cursor.fetchone()


async def one_value(conn: AsyncConnection, statement: LiteralString, params: Params) -> Any:
    """The first column of the first row. What it is, the statement knows; the caller says it in its own type."""
    cursor = await conn.execute(statement, params)
    row = await cursor.fetchone()
    return None if row is None else row[0]
