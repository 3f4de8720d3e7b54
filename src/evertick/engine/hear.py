"""hear: what runs and tasks left behind when they ended is told to the schedules that wait for it; those that have heard of
everything become due, and fire like any other (`fire`).
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import schedules
from evertick.store.schedules import Heard


async def hear(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Heard:
    """One batch of what has arrived."""
    return await as_leader(
        lambda: schedules.hear(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
