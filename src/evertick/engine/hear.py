"""hear: delivers the events of ended runs and tasks to the schedules that depend on them; a schedule whose dependencies are
all met becomes due, and fires like any other (`fire`).
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import schedules
from evertick.store.schedules import Heard


async def hear(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Heard:
    """Deliver one batch of events."""
    return await as_leader(
        lambda: schedules.hear(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
