"""Log chunks of attempts, as they arrive and as they are read."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.domain.attempt import TaskKey
from evertick.store.statements import sql


class NewChunk(NamedTuple):
    key: TaskKey
    epoch: int
    seq: int
    content: str


class Chunk(NamedTuple):
    epoch: int
    seq: int
    is_late: bool
    content: str


async def append(conn: AsyncConnection, *, session: int, chunks: list[NewChunk]) -> None:
    """Sending the same chunk twice is harmless."""
    rows = [
        {"r": c.key.run_id, "i": c.key.idx, "m": c.key.map_index, "e": c.epoch, "seq": c.seq, "content": c.content}
        for c in chunks
    ]
    await conn.execute(sql("logs", "append"), {"session": session, "chunks": Json(rows)})


async def read(
    conn: AsyncConnection, key: TaskKey, *, after: tuple[int, int] = (0, -1), limit: int = 200
) -> list[Chunk]:
    """Chunks after the given (epoch, seq), in order."""
    params = {**key._asdict(), "epoch": after[0], "seq": after[1], "limit": limit}
    cursor = await conn.execute(sql("logs", "read"), params)
    return [Chunk(*row) for row in await cursor.fetchall()]
