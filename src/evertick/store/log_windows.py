"""Parts of a task's log by their place in it, however long it is. Only reads, and never the whole."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.store.logs import FoundChunk
from evertick.store.statements import sql


class Size(NamedTuple):
    """Of one attempt's log; `last` is where its last chunk begins."""

    epoch: int
    size: int
    last: int


class Sought(NamedTuple):
    """What lines are looked for: a regular expression and a LIKE pattern that their chunks match; None for any. `text` is what the
    LIKE pattern looks for, as it was given."""

    pattern: str | None = None
    like: str | None = None
    text: str | None = None


ANY = Sought()
# As many chunks are looked through at most: 1 GB of log, more than is kept of any attempt unless somebody asked for it.
_WINDOW = 16_000


async def sizes(conn: AsyncConnection, key: TaskKey) -> list[Size]:
    cursor = await conn.execute(sql("log_windows", "sizes"), key._asdict())
    return [Size(*row) for row in await cursor.fetchall()]


async def onward(
    conn: AsyncConnection, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int
) -> list[FoundChunk]:
    """Chunks from the one that byte `at` (epoch, offset) lies in, in order. Those in the storage come whatever is sought."""
    cursor = await conn.execute(sql("log_windows", "onward"), _place(key, at, sought, limit))
    return [FoundChunk(*row) for row in await cursor.fetchall()]


async def backward(
    conn: AsyncConnection, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int
) -> list[FoundChunk]:
    """Chunks from the one that byte `at` lies in, the last first."""
    cursor = await conn.execute(sql("log_windows", "backward"), _place(key, at, sought, limit))
    return [FoundChunk(*row) for row in await cursor.fetchall()]


def _place(key: TaskKey, at: tuple[int, int], sought: Sought, limit: int) -> dict[str, object]:
    place = {"epoch": at[0], "seq": at[1], "limit": limit, "window": _WINDOW}
    return {**key._asdict(), **sought._asdict(), **place}
