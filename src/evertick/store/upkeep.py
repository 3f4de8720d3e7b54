"""The database's own state: dead rows and their vacuum, who holds an old snapshot, how large the tables are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.store.function_sets import TABLES_SCHEMA
from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql

# A line of so many means that runners cannot keep up, not that they are about to fetch it.
LONG_LINE = 1000


@dataclass(frozen=True, slots=True)
class Holder:
    """Who keeps dead rows from being vacuumed. `held_seconds` is None where the server does not know.

    `behind`: how many transactions have begun since.
    """

    kind: str
    name: str
    pid: int | None
    held_seconds: float | None
    xmin: str
    behind: int


@dataclass(frozen=True, slots=True)
class TableSize:
    name: str
    bytes: int


async def dead_rows(conn: AsyncConnection, tables: Sequence[str]) -> dict[str, int]:
    cursor = await conn.execute(sql("upkeep", "dead_rows"), {"tables": list(tables)})
    return {cast(str, name): cast(int, dead) for name, dead in await cursor.fetchall()}


async def vacuum(conn: AsyncConnection, tables: Sequence[str]) -> None:
    """Clear dead rows away, indexes included. Waits for nobody, and never locks a table to give its end back."""
    options = SQL("vacuum (skip_locked, truncate off, index_cleanup on) {}")
    await conn.execute(
        options.format(SQL(", ").join(Identifier(TABLES_SCHEMA, table) for table in tables)), prepare=False
    )


async def is_behind(conn: AsyncConnection) -> bool:
    return bool(await one_value(conn, sql("upkeep", "is_behind"), {"line": LONG_LINE}))


async def snapshot_holders(conn: AsyncConnection) -> list[Holder]:
    return await all_rows(conn, sql("upkeep", "snapshot_holders"), {}, Holder)


async def sizes(conn: AsyncConnection, *, limit: int = 100) -> list[TableSize]:
    """The largest first."""
    return await all_rows(conn, sql("upkeep", "sizes"), {"limit": limit}, TableSize)
