"""Who plans a shard: the lease row, its epoch, what the leader sees in one look, and the database's clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.domain.failover import Mark
from evertick.store.rows import one_row, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class Leader:
    """Of one shard. `leaders` lead any of the `of_shards` that there are, and nobody leads the `unled`."""

    owner: str | None
    epoch: int
    lease_until: datetime | None
    is_live: bool
    of_shards: int
    leaders: list[str]
    unled: list[int]

    @property
    def missing(self) -> str | None:
        """In words, what nobody leads."""
        if not self.unled:
            return None
        if len(self.unled) == self.of_shards:
            return "nobody leads, so nothing fires"
        which = ", ".join(str(each) for each in self.unled)
        return f"nobody leads shard{'s' if len(self.unled) > 1 else ''} {which}, so nothing fires there"


@dataclass(frozen=True, slots=True)
class Standing:
    """`epoch`: of the lead that was just taken, or None. `is_watched`: our session holds the session lock from now on.
    `free_in`: seconds until somebody else's lease ends. `of_shards`: how many shards are led."""

    epoch: int | None
    is_watched: bool
    free_in: float | None
    of_shards: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look of the leader found. A part that could not be looked at is None, and named in `troubles`. `marked_lsn` and
    `is_synchronous`: the mark that was made in passing. `of_shards` and `has_moves`: how many shards are led, and whether
    something in this one may belong to another; None in a look that did not renew."""

    read_at: datetime
    is_watched: bool
    next_fire: datetime | None
    next_timer: datetime | None
    has_line: bool | None
    next_expiry: datetime | None
    silent: list[int] | None
    stranded: list[int] | None
    overdue: list[int] | None
    with_room: list[int] | None
    backfills: list[int] | None
    has_arrivals: bool | None
    next_wake: datetime | None
    has_gates: bool | None
    next_opening: datetime | None
    has_deliveries: bool | None
    marked_lsn: int | None
    is_synchronous: bool | None
    of_shards: int | None
    has_moves: bool | None
    troubles: list[str]


async def bound_session(
    conn: AsyncConnection,
    *,
    statement_seconds: float,
    lock_seconds: float,
    transaction_seconds: float,
    idle_seconds: float = 0.0,
) -> None:
    """For the leader's own connections, with no limit for 0. Behind a pooler none of this holds: the lease alone decides."""
    params = {
        "statement_ms": str(int(statement_seconds * 1000)),
        "lock_ms": str(int(lock_seconds * 1000)),
        "transaction_ms": str(int(transaction_seconds * 1000)),
        "idle_ms": str(int(idle_seconds * 1000)),
    }
    await conn.execute(sql("shards", "bound_session"), params)


@dataclass(frozen=True, slots=True)
class Heard:
    """Sessions that were silent for too long, and sessions that are gone and still hold something."""

    silent: list[int]
    stranded: list[int]


async def stand_by(conn: AsyncConnection, *, shard: int, owner: str, seconds: float, watches: bool) -> Standing:
    """Take the shard if it is free. `watches`: our session is our own, so that its end can be seen."""
    params = {"shard": shard, "owner": owner, "seconds": seconds, "watches": watches}
    row = await one_row(conn, sql("shards", "stand_by"), params, Standing)
    assert row is not None
    return row


async def take(conn: AsyncConnection, *, shard: int, owner: str, seconds: float) -> int | None:
    """The new epoch, or None while somebody else's lease lasts. Nobody watches our session."""
    return (await stand_by(conn, shard=shard, owner=owner, seconds=seconds, watches=False)).epoch


async def look(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    lost_after: float,
    seconds: float | None = None,
    elapsed: float | None = None,
    watch: tuple[bool, bool] = (False, False),
    mark: Mark | None = None,
) -> Seen:
    """With `seconds` the lease is renewed, with `elapsed` silence is added up. `watch`: whether our session may hold the
    session lock, and whether it does. `mark` is moved on in passing."""
    params = {
        "shard": shard,
        "epoch": epoch,
        "seconds": seconds,
        "watches": watch[0],
        "is_watched": watch[1],
        "elapsed": elapsed,
        "lost_after": lost_after,
        "system_id": mark.server.system_id if mark else None,
        "timeline": mark.server.timeline if mark else None,
        "lsn": mark.lsn if mark else None,
    }
    row = await one_row(conn, sql("shards", "look"), params, Seen)
    assert row is not None
    return row


async def listen(conn: AsyncConnection, *, shard: int, epoch: int, elapsed: float, lost_after: float) -> Heard:
    params = {"shard": shard, "epoch": epoch, "elapsed": elapsed, "lost_after": lost_after}
    row = await one_row(conn, sql("shards", "listen"), params, Heard)
    assert row is not None
    return row


async def renew(conn: AsyncConnection, *, shard: int, epoch: int, seconds: float) -> bool:
    params = {"shard": shard, "epoch": epoch, "seconds": seconds}
    return bool(await one_value(conn, sql("shards", "renew"), params))


async def resign(conn: AsyncConnection, *, shard: int, epoch: int) -> bool:
    return bool(await one_value(conn, sql("shards", "resign"), {"shard": shard, "epoch": epoch}))


async def leader(conn: AsyncConnection, *, shard: int) -> Leader | None:
    return await one_row(conn, sql("shards", "leader"), {"shard": shard}, Leader)


async def read_clock(conn: AsyncConnection) -> datetime:
    return cast(datetime, await one_value(conn, sql("shards", "read_clock"), {}))
