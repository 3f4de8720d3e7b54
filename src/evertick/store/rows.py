"""Turns rows into records: one cursor per query, typed by the record that the caller names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.rows import AsyncRowFactory, RowMaker, class_row

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
