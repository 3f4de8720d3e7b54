"""Log chunks of attempts: appended as they arrive, and read."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.domain.attempt import TaskKey
from evertick.store.rows import one_value
from evertick.store.statements import sql


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
