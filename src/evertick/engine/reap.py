"""reap: turns a provable loss into a visible end state, and nothing else (V5).

A runner that is gone is marked dead, and its attempts are finished as lost like any other. A run in which nothing can move fails.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import runners, runs, shards
from evertick.store.db import retry_on_deadlock
from evertick.store.runners import Reaped
from evertick.store.shards import Heard


async def bury(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """For a process that can prove that a runner is gone. Returns the number of attempts taken from it. Idempotent."""
    return await retry_on_deadlock(
        lambda: runners.bury(conn, session=session, reason=reason, infra_retries=infra_retries)
    )


async def listen(conn: AsyncConnection, *, shard: int, epoch: int, elapsed: float, lost_after: float) -> Heard:
    """For the leader: count missed heartbeats up by `elapsed`, and return the sessions that are lost."""
    return await as_leader(
        lambda: shards.listen(conn, shard=shard, epoch=epoch, elapsed=elapsed, lost_after=lost_after),
        shard=shard,
        epoch=epoch,
    )


async def reap_runner(
    conn: AsyncConnection, *, shard: int, epoch: int, session: int, lost_after: float, infra_retries: int
) -> Reaped:
    """For the leader: mark a silent runner dead, or clean up after a runner that is gone and still holds something."""
    return await as_leader(
        lambda: runners.reap(
            conn, shard=shard, epoch=epoch, session=session, lost_after=lost_after, infra_retries=infra_retries
        ),
        shard=shard,
        epoch=epoch,
    )


async def reap_orphan(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int, orphan_after: float) -> str:
    """Fail a run in which nothing could move for that long: 'reaped', 'moved' (it is not stuck), or 'refused'."""
    return await as_leader(
        lambda: runs.reap_orphan(conn, shard=shard, epoch=epoch, run_id=run_id, orphan_after=orphan_after),
        shard=shard,
        epoch=epoch,
    )
