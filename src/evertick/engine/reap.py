"""reap: what is provably lost becomes an end that people can see, and nothing else does (V5).

A runner that is gone is buried, and what it held goes back through the ordinary door. A run in which nothing can move fails.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import runners, runs, shards
from evertick.store.db import retry_on_deadlock
from evertick.store.runners import Reaped
from evertick.store.shards import Heard


async def bury(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """For whoever can prove that a runner is gone. How many attempts were taken from it. Burying twice is harmless."""
    return await retry_on_deadlock(
        lambda: runners.bury(conn, session=session, reason=reason, infra_retries=infra_retries)
    )


async def listen(conn: AsyncConnection, *, shard: int, epoch: int, elapsed: float, lost_after: float) -> Heard:
    """For the leader: add so much to the silence of those who are silent, and see who is lost."""
    return await as_leader(
        lambda: shards.listen(conn, shard=shard, epoch=epoch, elapsed=elapsed, lost_after=lost_after),
        shard=shard,
        epoch=epoch,
    )


async def reap_runner(
    conn: AsyncConnection, *, shard: int, epoch: int, session: int, lost_after: float, infra_retries: int
) -> Reaped:
    """For the leader: give up a runner that has been silent for too long, or that is gone and still holds something."""
    return await as_leader(
        lambda: runners.reap(
            conn, shard=shard, epoch=epoch, session=session, lost_after=lost_after, infra_retries=infra_retries
        ),
        shard=shard,
        epoch=epoch,
    )


async def reap_orphan(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int, orphan_after: float) -> str:
    """Fail a run in which nothing could move for that long: 'reaped', 'moved' (it is none), or 'refused'."""
    return await as_leader(
        lambda: runs.reap_orphan(conn, shard=shard, epoch=epoch, run_id=run_id, orphan_after=orphan_after),
        shard=shard,
        epoch=epoch,
    )
