"""raise_alerts: records once per failure streak that a schedule did not fire, or that a run did not start or finish by its
deadline. The leader does this, because the process that missed the deadline may be gone.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.engine.fenced import as_leader
from evertick.store import alerts
from evertick.store.alerts import AlertChange


async def raise_alerts(
    conn: AsyncConnection, *, shard: int, epoch: int, unfired_seconds: float, batch: int
) -> list[AlertChange]:
    """The alerts that were raised or resolved."""
    return await as_leader(
        lambda: alerts.raise_due(conn, shard=shard, epoch=epoch, unfired_seconds=unfired_seconds, batch=batch),
        shard=shard,
        epoch=epoch,
    )
