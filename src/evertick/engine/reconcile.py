"""reconcile: recomputes derived state from the tasks themselves, one batch of the open runs at a time.

Checks without locks, and locks a run only to repair it. A run that cannot be repaired is quarantined (V11).
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import runs
from evertick.store.runs import Admitted, Reconciled


async def reconcile(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    after: tuple[int, int],
    batch: int,
    elapsed: float = 0.0,
    counts_line: bool = True,
) -> Reconciled:
    """Repair one batch. `last` is where the next batch starts; (0, 0) is the beginning.

    `elapsed` is added to the time for which a stuck run has been watched. `counts_line` also looks for tasks that are
    missing in the queue, which reads all of it.
    """
    return await as_leader(
        lambda: runs.reconcile(
            conn,
            shard=shard,
            epoch=epoch,
            after=after,
            batch=batch,
            elapsed=elapsed,
            counts_line=counts_line,
        ),
        shard=shard,
        epoch=epoch,
    )


async def skip_one(conn: AsyncConnection, *, shard: int, epoch: int, after: tuple[int, int]) -> tuple[int, int]:
    """Quarantine the next run, whose check alone exceeds the time limit. Returns where to continue."""
    return await as_leader(lambda: runs.skip_one(conn, shard=shard, epoch=epoch, after=after), shard=shard, epoch=epoch)


async def admit(conn: AsyncConnection, *, shard: int, epoch: int) -> Admitted:
    """Start queued runs that were passed over while they were locked."""
    return await as_leader(lambda: runs.admit(conn, shard=shard, epoch=epoch), shard=shard, epoch=epoch)
