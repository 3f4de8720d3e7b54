"""time_out: a run that takes longer than its DAG allows, and a task that no runner takes in time, are ended by the leader."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import runs, tasks
from evertick.store.tasks import TimedOut


async def time_out_run(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int) -> int | None:
    """How many running tasks were asked to stop; None if the run is not over its time any more, -1 if it was set aside."""
    return await as_leader(
        lambda: runs.time_out(conn, shard=shard, epoch=epoch, run_id=run_id), shard=shard, epoch=epoch
    )


async def time_out_waits(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> TimedOut:
    """Fail one batch of the tasks that waited longer in line than their queue_timeout."""
    return await as_leader(
        lambda: tasks.time_out_waits(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
