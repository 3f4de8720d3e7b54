"""notify: the recipients for all DAGs, the next notifications to send, and their results. Does not send them itself.

Only the leader takes notifications, and each is reserved for a while; a result is recorded by the attempt count alone, so
that a leader that was replaced while it sent can still record it.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.db.queries import notifications
from evertick.db.queries.notifications import ClaimedDelivery, Delivery
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.errors import Conflict
from evertick.engine.verbs import leader_verb, require

MOST_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """How many notifications expired, and how many have been waiting for how long."""

    given_up: int
    waiting: int
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """The default recipients for all DAGs, the expiry time (and how many expire per call), and the limit of counting."""

    defaults: list[dict[str, object]]
    give_up_seconds: float
    limit: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A sender's capacity: per sink, in total, and the time by which it finishes."""

    passed_over: list[str]
    each: int
    limit: int
    seconds: float


@leader_verb
async def maintain_outbox(conn: AsyncConnection, wish: OutboxSettings, *, shard: int, epoch: int) -> OutboxStatus:
    """Apply the leader's settings to the installation, expire notifications that waited too long, and count the waiting ones."""


@leader_verb
async def claim_deliveries(conn: AsyncConnection, room: Room, *, shard: int, epoch: int) -> list[ClaimedDelivery]: ...


@sql_function
async def retry_deliveries(
    conn: AsyncConnection, *, ids: list[int] | None, sink: str | None, limit: int, actor: Actor
) -> int: ...


async def retry_one(conn: AsyncConnection, *, delivery_id: int, actor: Actor) -> None:
    """Send a failed notification again from the start, under its old id."""
    found = await find_delivery(conn, delivery_id)
    if not await retry_deliveries(conn, ids=[delivery_id], sink=None, limit=1, actor=actor):
        what = "was already sent" if found.state == "sent" else "is still being tried"
        raise Conflict(f"Notification {delivery_id} {what}; only a failed one can be retried.")


async def retry_failed(conn: AsyncConnection, *, sink: str | None, actor: Actor) -> int:
    """All failed notifications, or those of one sink; at most ten thousand at once."""
    return await retry_deliveries(conn, ids=None, sink=sink, limit=MOST_AT_ONCE, actor=actor)


async def find_delivery(conn: AsyncConnection, delivery_id: int) -> Delivery:
    return require(await notifications.find_delivery(conn, delivery_id), "notification", delivery_id)
