"""notify: who is told of all DAGs, what is sent next, and what became of it. Sending itself is not done here.

Taking is the leader's, and for a while nobody else's; what an attempt came to is recorded by the count of attempts alone, so
that a leader which was replaced while it sent can still say that it did.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.errors import Conflict, NotFound
from evertick.engine.fenced import as_leader
from evertick.store import outbox
from evertick.store.db import retry_on_deadlock
from evertick.store.outbox import Delivery, Room, Taken, Tended, Wish

MOST_AT_ONCE = 10_000


async def tend_outbox(conn: AsyncConnection, *, shard: int, epoch: int, wish: Wish) -> Tended:
    """The settings of whoever leads are those of the installation; what waited too long is given up; what waits is counted."""
    return await as_leader(lambda: outbox.tend(conn, shard=shard, epoch=epoch, wish=wish), shard=shard, epoch=epoch)


async def take_due(conn: AsyncConnection, *, shard: int, epoch: int, room: Room) -> list[Taken]:
    return await as_leader(lambda: outbox.take(conn, shard=shard, epoch=epoch, room=room), shard=shard, epoch=epoch)


async def retry_one(conn: AsyncConnection, *, delivery_id: int, actor: str) -> None:
    """A failed one is tried again from the start, under its old id."""
    found = await find_delivery(conn, delivery_id)
    if not await retry_on_deadlock(lambda: outbox.retry(conn, ids=[delivery_id], sink=None, batch=1, actor=actor)):
        what = "was sent already" if found.state == "sent" else "is being tried anyway"
        raise Conflict(f"Notification {delivery_id} {what}; only a failed one can be tried again.")


async def retry_failed(conn: AsyncConnection, *, sink: str | None, actor: str) -> int:
    """All that failed, or those of one sink; at most ten thousand at once."""
    return await retry_on_deadlock(lambda: outbox.retry(conn, ids=None, sink=sink, batch=MOST_AT_ONCE, actor=actor))


async def find_delivery(conn: AsyncConnection, delivery_id: int) -> Delivery:
    found = await outbox.find(conn, delivery_id)
    if found is None:
        raise NotFound(f"There is no notification {delivery_id}. `evertick notifications list` shows what there is.")
    return found
