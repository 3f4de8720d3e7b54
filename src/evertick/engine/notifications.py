"""notify: the recipients for all DAGs, the next notifications to send, and their results. Does not send them itself.

Only the leader takes notifications, and each is reserved for a while; a result is recorded by the attempt count alone, so
that a leader that was replaced while it sent can still record it.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.connect import retry_on_deadlock
from evertick.db.queries import notifications
from evertick.db.queries.notifications import ClaimedDelivery, Delivery, DeliveryResult, OutboxStatus, Room
from evertick.domain.errors import Conflict, NotFound
from evertick.engine.verbs import as_leader

MOST_AT_ONCE = 10_000


async def tend_outbox(conn: AsyncConnection, *, shard: int, epoch: int, wish: DeliveryResult) -> OutboxStatus:
    """Apply the leader's settings to the installation, expire notifications that waited too long, and count the waiting ones."""
    return await as_leader(
        lambda: notifications.maintain_outbox(conn, shard=shard, epoch=epoch, wish=wish), shard=shard, epoch=epoch
    )


async def take_due(conn: AsyncConnection, *, shard: int, epoch: int, room: Room) -> list[ClaimedDelivery]:
    return await as_leader(
        lambda: notifications.claim_deliveries(conn, shard=shard, epoch=epoch, room=room), shard=shard, epoch=epoch
    )


async def retry_one(conn: AsyncConnection, *, delivery_id: int, actor: str) -> None:
    """Send a failed notification again from the start, under its old id."""
    found = await find_delivery(conn, delivery_id)
    if not await retry_on_deadlock(
        lambda: notifications.retry(conn, ids=[delivery_id], sink=None, batch=1, actor=actor)
    ):
        what = "was already sent" if found.state == "sent" else "is still being tried"
        raise Conflict(f"Notification {delivery_id} {what}; only a failed one can be retried.")


async def retry_failed(conn: AsyncConnection, *, sink: str | None, actor: str) -> int:
    """All failed notifications, or those of one sink; at most ten thousand at once."""
    return await retry_on_deadlock(
        lambda: notifications.retry(conn, ids=None, sink=sink, batch=MOST_AT_ONCE, actor=actor)
    )


async def find_delivery(conn: AsyncConnection, delivery_id: int) -> Delivery:
    found = await notifications.find_delivery(conn, delivery_id)
    if found is None:
        raise NotFound(
            f"There is no notification {delivery_id}. List notifications with `evertick notifications list`."
        )
    return found
