"""Queues: how many tasks are queued, which runners serve them, and the order of the queued tasks."""

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
    """`oldest_at` is when the first queued task was enqueued. Runners: the live ones, how many of them drain, and how many
    serve only tasks that match patterns."""

    queue: str
    depth: int
    oldest_at: datetime | None
    running: int
    runners: int
    draining: int
    specialised: int
    slots: int


class InLine(NamedTuple):
    """A queued task: `place` is 10 x the position of its queue, from 0, plus its rank."""

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
    """The number of queued tasks of each queue, `cap` if there are as many or more, for at most `most` queues."""
    return await all_rows(conn, sql("queues", "depths"), {"cap": cap, "most": most}, Depth)


async def list_all(conn: AsyncConnection, *, cap: int, limit: int = 1000) -> list[QueueRow]:
    return await all_rows(conn, sql("queues", "list"), {"cap": cap, "limit": limit}, QueueRow)


async def look_in_line(
    conn: AsyncConnection, *, queues: Sequence[str], begin: Sequence[int], window: int
) -> list[InLine]:
    """For each rank of each queue, up to `window` rows starting at that position."""
    params = {"queues": list(queues), "begin": list(begin), "window": window}
    cursor = await conn.execute(sql("queues", "look_in_line"), params, prepare=True)
    return [InLine(*row) for row in await cursor.fetchall()]


async def names(conn: AsyncConnection, tasks: Sequence[tuple[int, int]]) -> list[NamedTask]:
    params = {"version_ids": [version for version, _ in tasks], "idxs": [idx for _, idx in tasks]}
    return await all_rows(conn, sql("queues", "names"), params, NamedTask)


async def published(conn: AsyncConnection, *, limit: int) -> list[RoutedTask]:
    return await all_rows(conn, sql("queues", "published"), {"limit": limit}, RoutedTask)
