"""How rows become records: one cursor per question, typed by the record that the caller names."""

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
    """As psycopg's own, in a fifth of the time where nothing is in it: most params are empty, and every row of a run has some."""

    def load(self, data: Buffer) -> Any:
        # Bytes would be looked at for their encoding first.
        text = str(data, "utf-8")
        return {} if text == "{}" else json.loads(text)


# How values are read on every connection of ours.
VALUES = AdaptersMap(psycopg.adapters)
VALUES.register_loader("json", _Json)
VALUES.register_loader("jsonb", _Json)


def record_row(record: type[T]) -> AsyncRowFactory[T]:
    """As psycopg's `class_row`, in half the time where the columns come in the order of the fields: no dictionary for each row."""
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
    """The first column of the first row. What it is, the statement knows; the caller says it in its own type."""
    cursor = await conn.execute(statement, params)
    row = await cursor.fetchone()
    return None if row is None else row[0]
