"""Shard assignment: the number of shards, the schedulers that can lead them, and the moves of rows to their new shard."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.sharing import Share
from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql

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


async def survey(conn: AsyncConnection, *, owner: str, seconds: float, watches: bool) -> list[Share]:
    """The current assignment of shards; also registers this scheduler as live for `seconds`."""
    return await all_rows(
        conn, sql("shards", "survey"), {"owner": owner, "seconds": seconds, "watches": watches}, Share
    )


async def leave(conn: AsyncConnection, *, owner: str) -> None:
    await conn.execute(sql("shards", "leave"), {"owner": owner})


async def hand_over(conn: AsyncConnection, *, shard: int, epoch: int, heir: str, seconds: float) -> bool:
    params = {"shard": shard, "epoch": epoch, "heir": heir, "seconds": seconds}
    return bool(await one_value(conn, sql("shards", "hand_over"), params))


async def move_out(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Moved:
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
