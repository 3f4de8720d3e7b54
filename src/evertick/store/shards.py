"""Shard leadership: the lease row, its epoch, the leader's poll, and the database's clock."""

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
    """The leader of one shard. `leaders` lead any of the `of_shards` shards; the `unled` ones have no leader."""

    owner: str | None
    epoch: int
    lease_until: datetime | None
    is_live: bool
    of_shards: int
    leaders: list[str]
    unled: list[int]

    @property
    def missing(self) -> str | None:
        """A description of the shards without a leader."""
        if not self.unled:
            return None
        if len(self.unled) == self.of_shards:
            return "no scheduler leads, so nothing fires"
        which = ", ".join(str(each) for each in self.unled)
        return f"shard{'s' if len(self.unled) > 1 else ''} {which}: no scheduler leads, so nothing fires there"


@dataclass(frozen=True, slots=True)
class Standing:
    """`epoch`: of the leadership just acquired, or None. `is_watched`: our session holds the session lock from now on.
    `free_in`: seconds until another scheduler's lease ends. `of_shards`: the number of shards."""

    epoch: int | None
    is_watched: bool
    free_in: float | None
    of_shards: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one poll by the leader. A part that failed is None, and named in `troubles`. `marked_lsn` and
    `is_synchronous`: the mark that was written along the way. `of_shards` and `has_moves`: the number of shards, and whether
    something in this one may belong to another; None in a poll that did not renew the lease."""

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
    """For the leader's own connections; 0 means no limit. Behind a pooler none of this persists: only the lease decides."""
    params = {
        "statement_ms": str(int(statement_seconds * 1000)),
        "lock_ms": str(int(lock_seconds * 1000)),
        "transaction_ms": str(int(transaction_seconds * 1000)),
        "idle_ms": str(int(idle_seconds * 1000)),
    }
    await conn.execute(sql("shards", "bound_session"), params)


@dataclass(frozen=True, slots=True)
class Heard:
    """Sessions whose heartbeats timed out, and ended sessions that still hold something."""

    silent: list[int]
    stranded: list[int]


async def stand_by(conn: AsyncConnection, *, shard: int, owner: str, seconds: float, watches: bool) -> Standing:
    """Take the shard if it is free. `watches`: the session is not pooled, so that its end can be detected."""
    params = {"shard": shard, "owner": owner, "seconds": seconds, "watches": watches}
    row = await one_row(conn, sql("shards", "stand_by"), params, Standing)
    assert row is not None
    return row


async def take(conn: AsyncConnection, *, shard: int, owner: str, seconds: float) -> int | None:
    """The new epoch, or None while another scheduler's lease lasts. The session is not monitored."""
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
    """With `seconds` the lease is renewed, with `elapsed` missed heartbeats are counted. `watch`: whether our session may hold the
    session lock, and whether it does. `mark` is advanced along the way."""
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
