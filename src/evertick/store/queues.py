"""Queues: how much is in line."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class Depth:
    queue: str
    depth: int


async def depths(conn: AsyncConnection, *, cap: int, most: int) -> list[Depth]:
    """How many tasks each queue has in line, `cap` if there are as many or more, for at most so many queues."""
    return await all_rows(conn, sql("queues", "depths"), {"cap": cap, "most": most}, Depth)
