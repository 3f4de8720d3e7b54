"""Log chunks of attempts: appended as they arrive, read in windows, and moved to the log archive.

A late line of an attempt that lost its lease is stored with a mark (V3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.db.statements import query, sql
from evertick.domain.attempt import TaskKey


class NewChunk(NamedTuple):
    key: TaskKey
    epoch: int
    seq: int
    until: int
    content: str


class FoundChunk(NamedTuple):
    """A chunk as stored: with its lines, or with the part of an archived object that contains them."""

    epoch: int
    seq: int
    until: int
    is_late: bool
    content: str | None
    object_id: UUID | None = None
    at: int | None = None
    size: int | None = None
    digest: bytes | None = None


async def append(conn: AsyncConnection, *, session: int, chunks: list[NewChunk]) -> None:
    """Appending the same chunk twice is harmless."""
    await conn.execute(sql("logs", "append"), {"session": session, "chunks": chunk_document(chunks)})


def chunk_document(chunks: list[NewChunk]) -> Json:
    rows = [
        {
            "r": chunk.key.run_id,
            "i": chunk.key.idx,
            "m": chunk.key.map_index,
            "e": chunk.epoch,
            "seq": chunk.seq,
            "until": chunk.until,
            "content": chunk.content,
        }
        for chunk in chunks
    ]
    return Json(rows)


@query
async def read(
    conn: AsyncConnection, key: TaskKey, *, epoch: int = 0, seq: int = -1, limit: int = 200
) -> list[FoundChunk]:
    """Chunks after the given one, in order."""


@query
async def news(
    conn: AsyncConnection, key: TaskKey, *, epochs: list[int], seqs: list[int], newest: int, limit: int
) -> list[FoundChunk]:
    """Chunks after the last known `seq` of each epoch, and of epochs after `newest`; in order."""


class OrderedAttempt(NamedTuple):
    idx: int
    map_index: int
    epoch: int
    task: str
    started_at: datetime
    finished_at: datetime | None
    outcome: str
    reason: str | None


class AttemptPlace(NamedTuple):
    """The place of an attempt among those of its run, by their starts."""

    started_at: datetime
    idx: int
    map_index: int
    epoch: int


class OpenAttempts(NamedTuple):
    """Attempts of one run by their keys, each with the `seq` from which its log is read."""

    idxs: list[int]
    indexes: list[int]
    epochs: list[int]
    seqs: list[int]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> OpenAttempts:
        return cls(*([row[column] for row in rows] for column in range(4)))


@query
async def attempts_in_order(
    conn: AsyncConnection, opened: OpenAttempts, after: AttemptPlace, *, run_id: int, limit: int
) -> list[OrderedAttempt]:
    """Attempts of a run in the order of their starts: the open ones, and those after one attempt."""


async def of_attempts(
    conn: AsyncConnection, opened: OpenAttempts, *, run_id: int, chunks: int
) -> list[tuple[int, FoundChunk]]:
    """Up to `chunks` of each attempt, with its place in `opened`; in order."""
    params = {**opened._asdict(), "run_id": run_id, "chunks": chunks}
    cursor = await conn.execute(sql("logs", "of_attempts"), params)
    return [(row[0] - 1, FoundChunk(*row[1:])) for row in await cursor.fetchall()]


@query
async def shipped_until(conn: AsyncConnection, key: TaskKey, *, epoch: int) -> int: ...


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
WINDOW = 16_000


@query
async def sizes(conn: AsyncConnection, key: TaskKey) -> list[Size]: ...


@query
async def onward(
    conn: AsyncConnection, key: TaskKey, sought: Sought = ANY, *, epoch: int, seq: int, limit: int, window: int = WINDOW
) -> list[FoundChunk]:
    """Chunks in order, starting with the chunk of byte `seq` of that epoch. Archived chunks are returned whatever is searched."""


@query
async def backward(
    conn: AsyncConnection, key: TaskKey, sought: Sought = ANY, *, epoch: int, seq: int, limit: int, window: int = WINDOW
) -> list[FoundChunk]:
    """The same in reverse order."""


@dataclass(frozen=True, slots=True)
class RunWithLogs:
    """`finished_at` is None for a run that was deleted; `bytes` of its logs are in the database."""

    run_id: int
    finished_at: datetime | None
    bytes: int


class ChunkKey(NamedTuple):
    """The key of a chunk within its run."""

    idx: int
    map_index: int
    epoch: int
    seq: int


BEFORE_ALL = ChunkKey(-1, -1, 0, -1)


@query
async def ended(conn: AsyncConnection, *, after: int, seconds: float, batch: int) -> list[RunWithLogs]: ...


async def part(
    conn: AsyncConnection, run_id: int, *, after: ChunkKey, chunks: int, bytes_: int
) -> list[tuple[ChunkKey, str]]:
    params = {"run_id": run_id, **after._asdict(), "chunks": chunks, "bytes": bytes_}
    cursor = await conn.execute(sql("logs", "part"), params)
    return [(ChunkKey(*row[:4]), str(row[4])) for row in await cursor.fetchall()]
