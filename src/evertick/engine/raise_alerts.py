"""raise_alerts: a schedule that did not fire, a run that did not start or finish by its deadline, is put on record once per
episode. By the leader: whoever should have done it may be the one that is gone.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import alerts
from evertick.store.alerts import AlertChange


async def raise_alerts(
    conn: AsyncConnection, *, shard: int, epoch: int, unfired_seconds: float, batch: int
) -> list[AlertChange]:
    """What was raised, and what is over."""
    return await as_leader(
        lambda: alerts.raise_due(conn, shard=shard, epoch=epoch, unfired_seconds=unfired_seconds, batch=batch),
        shard=shard,
        epoch=epoch,
    )
