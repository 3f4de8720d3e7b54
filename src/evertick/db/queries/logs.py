"""Log chunks of attempts: appended as they arrive, read in windows, and moved to the log archive.

A late line of an attempt that lost its lease is stored with a mark (V3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, cast
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.db.statements import all_rows, one_value, sql
from evertick.domain.attempt import TaskKey
from evertick.domain.log_archive import Piece


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
    await conn.execute(sql("logs", "append"), {"session": session, "chunks": Json(rows)})


async def read(
    conn: AsyncConnection, key: TaskKey, *, after: tuple[int, int] = (0, -1), limit: int = 200
) -> list[FoundChunk]:
    """Chunks after the given (epoch, seq), in order."""
    params = {**key._asdict(), "epoch": after[0], "seq": after[1], "limit": limit}
    cursor = await conn.execute(sql("logs", "read"), params)
    return [FoundChunk(*row) for row in await cursor.fetchall()]


async def news(conn: AsyncConnection, key: TaskKey, *, known: dict[int, int], limit: int) -> list[FoundChunk]:
    """Chunks after the last known `seq` of each epoch, and of later epochs; in order."""
    params: dict[str, object] = {**key._asdict(), "epochs": list(known), "seqs": list(known.values())}
    cursor = await conn.execute(sql("logs", "news"), {**params, "newest": max(known, default=0), "limit": limit})
    return [FoundChunk(*row) for row in await cursor.fetchall()]


async def shipped_until(conn: AsyncConnection, key: TaskKey, *, epoch: int) -> int:
    return int(await one_value(conn, sql("logs", "shipped_until"), {**key._asdict(), "epoch": epoch}))


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
    cursor = await conn.execute(sql("logs", "sizes"), key._asdict())
    return [Size(*row) for row in await cursor.fetchall()]


async def onward(
    conn: AsyncConnection, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int
) -> list[FoundChunk]:
    """Chunks in order, starting with the chunk of byte `at` (epoch, offset). Archived chunks are returned whatever is searched."""
    cursor = await conn.execute(sql("logs", "onward"), _place(key, at, sought, limit))
    return [FoundChunk(*row) for row in await cursor.fetchall()]


async def backward(
    conn: AsyncConnection, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int
) -> list[FoundChunk]:
    """Chunks in reverse order, starting with the chunk of byte `at`."""
    cursor = await conn.execute(sql("logs", "backward"), _place(key, at, sought, limit))
    return [FoundChunk(*row) for row in await cursor.fetchall()]


def _place(key: TaskKey, at: tuple[int, int], sought: Sought, limit: int) -> dict[str, object]:
    place = {"epoch": at[0], "seq": at[1], "limit": limit, "window": _WINDOW}
    return {**key._asdict(), **sought._asdict(), **place}


class Leading(NamedTuple):
    """The leader in whose name logs are archived."""

    shard: int
    epoch: int


@dataclass(frozen=True, slots=True)
class EndedRun:
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


@dataclass(frozen=True, slots=True)
class DeadObject:
    object_id: UUID
    run_id: int


async def watch(conn: AsyncConnection, leading: Leading, *, batch: int) -> int:
    return int(await one_value(conn, sql("logs", "watch"), {**leading._asdict(), "batch": batch}))


async def ended(conn: AsyncConnection, *, after: int, seconds: float, batch: int) -> list[EndedRun]:
    params = {"after": after, "seconds": seconds, "batch": batch}
    return await all_rows(conn, sql("logs", "ended"), params, EndedRun)


async def part(
    conn: AsyncConnection, run_id: int, *, after: ChunkKey, chunks: int, bytes_: int
) -> list[tuple[ChunkKey, str]]:
    params = {"run_id": run_id, **after._asdict(), "chunks": chunks, "bytes": bytes_}
    cursor = await conn.execute(sql("logs", "part"), params)
    return [(ChunkKey(*row[:4]), str(row[4])) for row in await cursor.fetchall()]


async def list_object(conn: AsyncConnection, leading: Leading, *, run_id: int, bytes_: int) -> UUID:
    params = {**leading._asdict(), "run_id": run_id, "bytes": bytes_}
    return cast(UUID, await one_value(conn, sql("logs", "list_object"), params))


async def move(
    conn: AsyncConnection, leading: Leading, object_id: UUID, placed: Sequence[tuple[ChunkKey, Piece]]
) -> int:
    """The number of chunks that are now only in the storage."""
    pieces = [
        {**key._asdict(), "at": piece.at, "bytes": piece.size, "digest": piece.digest.hex()} for key, piece in placed
    ]
    params = {**leading._asdict(), "object_id": object_id, "pieces": Json(pieces)}
    return int(await one_value(conn, sql("logs", "move"), params))


async def unwatch(conn: AsyncConnection, leading: Leading, done: Sequence[EndedRun]) -> None:
    run_ids, finished = [each.run_id for each in done], [each.finished_at for each in done]
    await conn.execute(sql("logs", "unwatch"), {**leading._asdict(), "run_ids": run_ids, "finished": finished})


async def dead(conn: AsyncConnection, leading: Leading, *, batch: int) -> list[DeadObject]:
    return await all_rows(conn, sql("logs", "dead"), {**leading._asdict(), "batch": batch}, DeadObject)


async def forget(conn: AsyncConnection, leading: Leading, object_ids: Sequence[UUID]) -> None:
    await conn.execute(sql("logs", "forget"), {**leading._asdict(), "object_ids": list(object_ids)})
