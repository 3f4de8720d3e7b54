"""move_logs: lines of ended runs leave the database once they are in the object storage. Only in the name of shard 0's leader.

Each of these is one transaction. An object is listed before it is put and until after it was removed, so that a death at any
moment leaves neither lines that are nowhere nor an object that nobody knows of.
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
    """The next runs are looked after; how many there were."""
    return await as_leader(lambda: log_moves.watch(conn, leading, batch=batch), **leading._asdict())


async def list_object(conn: AsyncConnection, leading: Leading, *, run_id: int, size: int) -> UUID:
    """Before it is put."""
    return await as_leader(
        lambda: log_moves.list_object(conn, leading, run_id=run_id, bytes_=size), **leading._asdict()
    )


async def move_lines(
    conn: AsyncConnection, leading: Leading, object_id: UUID, placed: Sequence[tuple[ChunkKey, Piece]]
) -> int:
    """After it was put: the lines go, and their rows say where they are. How many chunks; none if the run is gone."""
    return await as_leader(lambda: log_moves.move(conn, leading, object_id, placed), **leading._asdict())


async def leave_runs(conn: AsyncConnection, leading: Leading, done: Sequence[EndedRun]) -> None:
    """They are not looked after any more, unless they have begun again since."""
    await as_leader(lambda: log_moves.unwatch(conn, leading, done), **leading._asdict())


async def dead_objects(conn: AsyncConnection, leading: Leading, *, batch: int) -> list[DeadObject]:
    """Objects without a line. They stay on the list until they are forgotten."""
    return await as_leader(lambda: log_moves.dead(conn, leading, batch=batch), **leading._asdict())


async def forget_objects(conn: AsyncConnection, leading: Leading, object_ids: Sequence[UUID]) -> None:
    """After they were removed."""
    await as_leader(lambda: log_moves.forget(conn, leading, object_ids), **leading._asdict())
