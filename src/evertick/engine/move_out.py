"""move_out: the leader of a shard transfers rows that belong to another shard, in bounded batches."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import sharing
from evertick.store.sharing import Moved


async def move_out(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Moved:
    return await as_leader(
        lambda: sharing.move_out(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
