"""promote: pending tasks whose time has come become available. Only the leader of the shard does this."""

from __future__ import annotations

import psycopg
from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader
from evertick.engine.fire import NOT_LEADER
from evertick.store import tasks
from evertick.store.db import retry_on_deadlock
from evertick.store.tasks import Promoted


async def promote(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Promoted:
    """One batch. The answer says when the next task is due by time."""
    try:
        return await retry_on_deadlock(lambda: tasks.promote(conn, shard=shard, epoch=epoch, batch=batch))
    except psycopg.Error as error:
        if error.sqlstate == NOT_LEADER:
            raise NotLeader(f"epoch {epoch} of shard {shard} is over; nothing was promoted") from error
        raise
