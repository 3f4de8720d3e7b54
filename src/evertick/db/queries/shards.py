"""Shard leadership: the lease row, its epoch, the leader's poll, and the assignment of shards to schedulers.

Every write of a leader names its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of one shard. `leaders` lead any of the `shard_count` shards; the `unled` ones have no leader."""

    owner: str | None
    epoch: int
    lease_until: datetime | None
    is_live: bool
    shard_count: int
    leaders: list[str]
    unled: list[int]

    @property
    def missing(self) -> str | None:
        """A description of the shards without a leader."""
        if not self.unled:
            return None
        if len(self.unled) == self.shard_count:
            return "no scheduler leads, so nothing fires"
        which = ", ".join(str(each) for each in self.unled)
        return f"shard{'s' if len(self.unled) > 1 else ''} {which}: no scheduler leads, so nothing fires there"


@query
async def bound_session(
    conn: AsyncConnection,
    *,
    statement_seconds: float,
    lock_seconds: float,
    transaction_seconds: float,
    idle_seconds: float = 0.0,
) -> None:
    """For the leader's own connections; 0 means no limit. Behind a pooler none of this persists: only the lease decides."""


@query
async def leader(conn: AsyncConnection, *, shard: int) -> Leader | None: ...


@query
async def read_clock(conn: AsyncConnection) -> datetime: ...


# Remaining moves are counted up to this limit: it suffices to show progress.
MOST_COUNTED = 10_000


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


@query
async def announce_leave(conn: AsyncConnection, *, owner: str) -> None: ...


@query
async def page(conn: AsyncConnection, *, cap: int = MOST_COUNTED) -> list[ShardRow]: ...


@query
async def schedulers(conn: AsyncConnection) -> list[SchedulerRow]: ...
