"""reconcile: re-derive what should be true from the tasks themselves, a slice of the open runs at a time.

Looks without a lock, and locks a run only to repair it. One that cannot be repaired is set aside (V11).
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
    """Repair one slice. `last` is where the next slice starts; (0, 0) is the beginning.

    `elapsed` is added to the time for which we have watched a stuck run be stuck. `counts_line` also looks for tasks that are
    missing in line, which reads all of it.
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
    """Set aside the next run, which alone takes longer to look at than there is time. Returns where to go on."""
    return await as_leader(lambda: runs.skip_one(conn, shard=shard, epoch=epoch, after=after), shard=shard, epoch=epoch)


async def admit(conn: AsyncConnection, *, shard: int, epoch: int) -> Admitted:
    """Start queued runs that were passed over while somebody worked on them."""
    return await as_leader(lambda: runs.admit(conn, shard=shard, epoch=epoch), shard=shard, epoch=epoch)
