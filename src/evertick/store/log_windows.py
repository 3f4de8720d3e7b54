"""Windows of a task's log by position, however long the log is. Read-only, and never the whole log."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.store.logs import FoundChunk
from evertick.store.statements import sql


class Size(NamedTuple):
    """The size of one attempt's log; `last` is where its last chunk begins."""

    epoch: int
    size: int
    last: int


class Sought(NamedTuple):
    """A search in log lines: a regular expression and a LIKE pattern for their chunks; None matches any. `text` is the search
    text of the LIKE pattern, as given."""

    pattern: str | None = None
    like: str | None = None
    text: str | None = None


ANY = Sought()
# The most chunks searched: 1 GB of log, more than is kept of any attempt by default.
_WINDOW = 16_000


async def sizes(conn: AsyncConnection, key: TaskKey) -> list[Size]:
    cursor = await conn.execute(sql("log_windows", "sizes"), key._asdict())
    return [Size(*row) for row in await cursor.fetchall()]


async def onward(
    conn: AsyncConnection, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int
) -> list[FoundChunk]:
    """Chunks in order, starting with the chunk of byte `at` (epoch, offset). Archived chunks are returned whatever is searched."""
    cursor = await conn.execute(sql("log_windows", "onward"), _place(key, at, sought, limit))
    return [FoundChunk(*row) for row in await cursor.fetchall()]


async def backward(
    conn: AsyncConnection, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int
) -> list[FoundChunk]:
    """Chunks in reverse order, starting with the chunk of byte `at`."""
    cursor = await conn.execute(sql("log_windows", "backward"), _place(key, at, sought, limit))
    return [FoundChunk(*row) for row in await cursor.fetchall()]


def _place(key: TaskKey, at: tuple[int, int], sought: Sought, limit: int) -> dict[str, object]:
    place = {"epoch": at[0], "seq": at[1], "limit": limit, "window": _WINDOW}
    return {**key._asdict(), **sought._asdict(), **place}
