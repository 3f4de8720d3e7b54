"""reconcile: re-derive what should be true from the tasks themselves, a slice of the open runs at a time."""

from __future__ import annotations

import psycopg
from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader
from evertick.engine.fire import NOT_LEADER
from evertick.store import runs
from evertick.store.db import retry_on_deadlock
from evertick.store.runs import Reconciled


async def reconcile(conn: AsyncConnection, *, shard: int, epoch: int, after: tuple[int, int], batch: int) -> Reconciled:
    """Repair one slice. `last` is where the next slice starts; (0, 0) is the beginning."""
    try:
        return await retry_on_deadlock(lambda: runs.reconcile(conn, shard=shard, epoch=epoch, after=after, batch=batch))
    except psycopg.Error as error:
        if error.sqlstate == NOT_LEADER:
            raise NotLeader(f"epoch {epoch} of shard {shard} is over; nothing was reconciled") from error
        raise
