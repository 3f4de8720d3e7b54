"""Archiving logs to object storage: due runs, parts of their logs, the list of objects. Decisions are made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, cast
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.domain.log_pack import Piece
from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql


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
    return int(await one_value(conn, sql("log_moves", "watch"), {**leading._asdict(), "batch": batch}))


async def ended(conn: AsyncConnection, *, after: int, seconds: float, batch: int) -> list[EndedRun]:
    params = {"after": after, "seconds": seconds, "batch": batch}
    return await all_rows(conn, sql("log_moves", "ended"), params, EndedRun)


async def part(
    conn: AsyncConnection, run_id: int, *, after: ChunkKey, chunks: int, bytes_: int
) -> list[tuple[ChunkKey, str]]:
    params = {"run_id": run_id, **after._asdict(), "chunks": chunks, "bytes": bytes_}
    cursor = await conn.execute(sql("log_moves", "part"), params)
    return [(ChunkKey(*row[:4]), str(row[4])) for row in await cursor.fetchall()]


async def list_object(conn: AsyncConnection, leading: Leading, *, run_id: int, bytes_: int) -> UUID:
    params = {**leading._asdict(), "run_id": run_id, "bytes": bytes_}
    return cast(UUID, await one_value(conn, sql("log_moves", "list_object"), params))


async def move(
    conn: AsyncConnection, leading: Leading, object_id: UUID, placed: Sequence[tuple[ChunkKey, Piece]]
) -> int:
    """The number of chunks that are now only in the storage."""
    pieces = [
        {**key._asdict(), "at": piece.at, "bytes": piece.size, "digest": piece.digest.hex()} for key, piece in placed
    ]
    params = {**leading._asdict(), "object_id": object_id, "pieces": Json(pieces)}
    return int(await one_value(conn, sql("log_moves", "move"), params))


async def unwatch(conn: AsyncConnection, leading: Leading, done: Sequence[EndedRun]) -> None:
    run_ids, finished = [each.run_id for each in done], [each.finished_at for each in done]
    await conn.execute(sql("log_moves", "unwatch"), {**leading._asdict(), "run_ids": run_ids, "finished": finished})


async def dead(conn: AsyncConnection, leading: Leading, *, batch: int) -> list[DeadObject]:
    return await all_rows(conn, sql("log_moves", "dead"), {**leading._asdict(), "batch": batch}, DeadObject)


async def forget(conn: AsyncConnection, leading: Leading, object_ids: Sequence[UUID]) -> None:
    await conn.execute(sql("log_moves", "forget"), {**leading._asdict(), "object_ids": list(object_ids)})
