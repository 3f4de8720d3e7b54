"""The state of the database itself: dead rows and their vacuum, sessions with an old snapshot, table sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.store.function_sets import TABLES_SCHEMA
from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql

# A queue this long means that runners cannot keep up, not that they are about to claim it.
LONG_LINE = 1000


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that keeps dead rows from being vacuumed. `held_seconds` is None if the server does not know it.

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
    """Vacuum dead rows, indexes included. Never waits for a lock, and never locks a table to truncate it."""
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
