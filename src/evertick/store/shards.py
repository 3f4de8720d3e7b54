"""Who plans which shard: the lease row, its epoch, and the database's clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.store.rows import one_row, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class Leader:
    owner: str | None
    epoch: int
    lease_until: datetime | None
    is_live: bool


async def take(conn: AsyncConnection, *, shard: int, owner: str, seconds: float) -> int | None:
    """The new epoch, or None while somebody else's lease lasts."""
    params = {"shard": shard, "owner": owner, "seconds": seconds}
    return cast("int | None", await one_value(conn, sql("shards", "take"), params))


async def renew(conn: AsyncConnection, *, shard: int, epoch: int, seconds: float) -> bool:
    params = {"shard": shard, "epoch": epoch, "seconds": seconds}
    return bool(await one_value(conn, sql("shards", "renew"), params))


async def resign(conn: AsyncConnection, *, shard: int, epoch: int) -> bool:
    return bool(await one_value(conn, sql("shards", "resign"), {"shard": shard, "epoch": epoch}))


async def leader(conn: AsyncConnection, *, shard: int) -> Leader | None:
    return await one_row(conn, sql("shards", "leader"), {"shard": shard}, Leader)


async def read_clock(conn: AsyncConnection) -> datetime:
    return cast(datetime, await one_value(conn, sql("shards", "read_clock"), {}))
