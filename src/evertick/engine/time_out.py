"""time_out: the leader ends a run that exceeds its run_timeout, and a task that is not claimed within its queue_timeout."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import runs, tasks
from evertick.store.tasks import TimedOut


async def time_out_run(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int) -> int | None:
    """The number of tasks with a stop request; None if the run is no longer over its limit, -1 if it was quarantined."""
    return await as_leader(
        lambda: runs.time_out(conn, shard=shard, epoch=epoch, run_id=run_id), shard=shard, epoch=epoch
    )


async def time_out_waits(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> TimedOut:
    """Fail one batch of the tasks that were queued longer than their queue_timeout."""
    return await as_leader(
        lambda: tasks.time_out_waits(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
