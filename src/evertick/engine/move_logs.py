"""move_logs: removes lines of ended runs from the database once they are in the object storage. Only for the leader of shard 0.

Each function is one transaction. An object is listed before it is uploaded and until after it was deleted, so that a crash at any
moment leaves neither lost lines nor an unknown object.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from psycopg import AsyncConnection

from evertick.domain.log_pack import Piece
from evertick.engine.fenced import as_leader
from evertick.store import log_moves
from evertick.store.log_moves import ChunkKey, DeadObject, EndedRun, Leading


async def watch_runs(conn: AsyncConnection, leading: Leading, *, batch: int) -> int:
    """Put the next runs on the watch list; returns their number."""
    return await as_leader(lambda: log_moves.watch(conn, leading, batch=batch), **leading._asdict())


async def list_object(conn: AsyncConnection, leading: Leading, *, run_id: int, size: int) -> UUID:
    """To be called before the upload."""
    return await as_leader(
        lambda: log_moves.list_object(conn, leading, run_id=run_id, bytes_=size), **leading._asdict()
    )


async def move_lines(
    conn: AsyncConnection, leading: Leading, object_id: UUID, placed: Sequence[tuple[ChunkKey, Piece]]
) -> int:
    """After the upload: delete the lines, and store their position. Returns the number of chunks; 0 if the run is gone."""
    return await as_leader(lambda: log_moves.move(conn, leading, object_id, placed), **leading._asdict())


async def leave_runs(conn: AsyncConnection, leading: Leading, done: Sequence[EndedRun]) -> None:
    """Take the runs off the watch list, unless they were reopened since."""
    await as_leader(lambda: log_moves.unwatch(conn, leading, done), **leading._asdict())


async def dead_objects(conn: AsyncConnection, leading: Leading, *, batch: int) -> list[DeadObject]:
    """Objects without lines. They stay on the list until they are deleted."""
    return await as_leader(lambda: log_moves.dead(conn, leading, batch=batch), **leading._asdict())


async def forget_objects(conn: AsyncConnection, leading: Leading, object_ids: Sequence[UUID]) -> None:
    """After their deletion."""
    await as_leader(lambda: log_moves.forget(conn, leading, object_ids), **leading._asdict())
