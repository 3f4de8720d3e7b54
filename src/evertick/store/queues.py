"""Queues: how much is in line, who serves them, and what lies where in line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class Depth:
    queue: str
    depth: int


@dataclass(frozen=True, slots=True)
class QueueRow:
    """`oldest_at` is since when the first in line waits. Runners: those that live, of them the ones that drain, and the ones
    that serve only tasks of some names."""

    queue: str
    depth: int
    oldest_at: datetime | None
    running: int
    runners: int
    draining: int
    specialised: int
    slots: int


class InLine(NamedTuple):
    """A task in line: `place` is 10 x the place of its queue, from 0, plus its rank."""

    place: int
    seq: int
    version_id: int
    idx: int
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class NamedTask:
    version_id: int
    idx: int
    dag: str
    task: str


@dataclass(frozen=True, slots=True)
class RoutedTask:
    dag: str
    task: str
    queue: str


async def depths(conn: AsyncConnection, *, cap: int, most: int) -> list[Depth]:
    """How many tasks each queue has in line, `cap` if there are as many or more, for at most so many queues."""
    return await all_rows(conn, sql("queues", "depths"), {"cap": cap, "most": most}, Depth)


async def list_all(conn: AsyncConnection, *, cap: int, limit: int = 1000) -> list[QueueRow]:
    return await all_rows(conn, sql("queues", "list"), {"cap": cap, "limit": limit}, QueueRow)


async def look_in_line(
    conn: AsyncConnection, *, queues: Sequence[str], begin: Sequence[int], window: int
) -> list[InLine]:
    """For each rank of each queue up to `window` rows from that place on."""
    params = {"queues": list(queues), "begin": list(begin), "window": window}
    cursor = await conn.execute(sql("queues", "look_in_line"), params, prepare=True)
    return [InLine(*row) for row in await cursor.fetchall()]


async def names(conn: AsyncConnection, tasks: Sequence[tuple[int, int]]) -> list[NamedTask]:
    params = {"version_ids": [version for version, _ in tasks], "idxs": [idx for _, idx in tasks]}
    return await all_rows(conn, sql("queues", "names"), params, NamedTask)


async def published(conn: AsyncConnection, *, limit: int) -> list[RoutedTask]:
    return await all_rows(conn, sql("queues", "published"), {"limit": limit}, RoutedTask)
