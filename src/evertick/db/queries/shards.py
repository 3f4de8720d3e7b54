"""Shard leadership: the lease row, its epoch, the leader's poll, and the assignment of shards to schedulers.

Every write of a leader names its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, one_row, one_value, sql
from evertick.domain.failover import WalMark
from evertick.domain.shards import ShardStatus


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
class AcquireResult:
    """`epoch`: of the leadership just acquired, or None. `is_watched`: our session holds the session lock from now on.
    `free_in`: seconds until another scheduler's lease ends. `of_shards`: the number of shards."""

    epoch: int | None
    is_watched: bool
    free_in: float | None
    of_shards: int | None


@dataclass(frozen=True, slots=True)
class PendingWork:
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
class LivenessChange:
    """Sessions whose heartbeats timed out, and ended sessions that still hold something."""

    silent: list[int]
    stranded: list[int]


async def try_acquire_shard(
    conn: AsyncConnection, *, shard: int, owner: str, seconds: float, watches: bool
) -> AcquireResult:
    """Take the shard if it is free. `watches`: the session is not pooled, so that its end can be detected."""
    params = {"shard": shard, "owner": owner, "seconds": seconds, "watches": watches}
    row = await one_row(conn, sql("shards", "stand_by"), params, AcquireResult)
    assert row is not None
    return row


async def acquire_shard(conn: AsyncConnection, *, shard: int, owner: str, seconds: float) -> int | None:
    """The new epoch, or None while another scheduler's lease lasts. The session is not monitored."""
    return (await try_acquire_shard(conn, shard=shard, owner=owner, seconds=seconds, watches=False)).epoch


async def poll_work(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    lost_after: float,
    seconds: float | None = None,
    elapsed: float | None = None,
    watch: tuple[bool, bool] = (False, False),
    mark: WalMark | None = None,
) -> PendingWork:
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
    row = await one_row(conn, sql("shards", "look"), params, PendingWork)
    assert row is not None
    return row


async def observe_heartbeats(
    conn: AsyncConnection, *, shard: int, epoch: int, elapsed: float, lost_after: float
) -> LivenessChange:
    params = {"shard": shard, "epoch": epoch, "elapsed": elapsed, "lost_after": lost_after}
    row = await one_row(conn, sql("shards", "listen"), params, LivenessChange)
    assert row is not None
    return row


async def renew_shard(conn: AsyncConnection, *, shard: int, epoch: int, seconds: float) -> bool:
    params = {"shard": shard, "epoch": epoch, "seconds": seconds}
    return bool(await one_value(conn, sql("shards", "renew"), params))


async def release_shard(conn: AsyncConnection, *, shard: int, epoch: int) -> bool:
    return bool(await one_value(conn, sql("shards", "resign"), {"shard": shard, "epoch": epoch}))


async def leader(conn: AsyncConnection, *, shard: int) -> Leader | None:
    return await one_row(conn, sql("shards", "leader"), {"shard": shard}, Leader)


async def read_clock(conn: AsyncConnection) -> datetime:
    return cast(datetime, await one_value(conn, sql("shards", "read_clock"), {}))


# Remaining moves are counted up to this limit: it suffices to show progress.
MOST_COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class Moved:
    """`is_over`: nothing is left to move, permanently. `is_closed`: and the shard is no longer led."""

    moved: int
    is_over: bool
    is_closed: bool


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard, for people. `misplaced`: how many of its rows still have to move to another shard."""

    shard: int
    state: str
    owner: str | None
    epoch: int
    led_since: datetime | None
    lease_until: datetime | None
    is_live: bool
    dags: int
    misplaced: int


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    owner: str
    since: datetime


async def survey(conn: AsyncConnection, *, owner: str, seconds: float, watches: bool) -> list[ShardStatus]:
    """The current assignment of shards; also registers this scheduler as live for `seconds`."""
    return await all_rows(
        conn, sql("shards", "survey"), {"owner": owner, "seconds": seconds, "watches": watches}, ShardStatus
    )


async def announce_leave(conn: AsyncConnection, *, owner: str) -> None:
    await conn.execute(sql("shards", "leave"), {"owner": owner})


async def hand_over(conn: AsyncConnection, *, shard: int, epoch: int, heir: str, seconds: float) -> bool:
    params = {"shard": shard, "epoch": epoch, "heir": heir, "seconds": seconds}
    return bool(await one_value(conn, sql("shards", "hand_over"), params))


async def rebalance_shard(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Moved:
    row = await one_row(conn, sql("shards", "move_out"), {"shard": shard, "epoch": epoch, "batch": batch}, Moved)
    assert row is not None
    return row


async def set_shards(conn: AsyncConnection, *, shards: int, actor: str, if_never_chosen: bool) -> bool:
    params = {"shards": shards, "actor": actor, "if_never_chosen": if_never_chosen}
    return bool(await one_value(conn, sql("shards", "set_shards"), params))


async def page(conn: AsyncConnection) -> list[ShardRow]:
    return await all_rows(conn, sql("shards", "page"), {"cap": MOST_COUNTED}, ShardRow)


async def schedulers(conn: AsyncConnection) -> list[SchedulerRow]:
    return await all_rows(conn, sql("shards", "schedulers"), {}, SchedulerRow)
