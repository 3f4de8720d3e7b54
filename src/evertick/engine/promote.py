"""promote: pending tasks whose time has come become available, within their queue's limit of active retries (H5).

Only the leader of the shard does this.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import tasks
from evertick.store.tasks import Promoted


async def promote(
    conn: AsyncConnection, *, shard: int, epoch: int, batch: int, max_active_retries: int | None = None
) -> Promoted:
    """One batch. The result says when the next task is due by time, and whether some wait for the limit.

    `max_active_retries` applies per queue; None is half of the slots of the live runners that serve it.
    """
    return await as_leader(
        lambda: tasks.promote(conn, shard=shard, epoch=epoch, batch=batch, bound=max_active_retries),
        shard=shard,
        epoch=epoch,
    )
