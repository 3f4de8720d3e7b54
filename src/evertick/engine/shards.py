"""Shards: their leadership, the leader's poll, their assignment to schedulers, and moves between them.

Every write of a leader names its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.errors import UserError
from evertick.domain.shards import MOST_SHARDS, ShardStatus
from evertick.engine.verbs import leader_verb


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """`epoch`: of the leadership just acquired, or None. `has_session_lock`: our session holds the session lock from now on.
    `free_in`: seconds until another scheduler's lease ends. `shard_count`: the number of shards."""

    epoch: int | None
    has_session_lock: bool
    free_in: float | None
    shard_count: int | None


@dataclass(frozen=True, slots=True)
class PendingWork:
    """The result of one poll by the leader. A part that failed is None, and named in `errors`. `marked_lsn` and
    `is_synchronous`: the mark that was written along the way. `shard_count` and `has_moves`: the number of shards, and whether
    something in this one may belong to another; None in a poll that did not renew the lease."""

    read_at: datetime
    has_session_lock: bool
    next_fire: datetime | None
    next_timer: datetime | None = None
    has_waiting_retries: bool | None = None
    next_expiry: datetime | None = None
    silent_sessions: list[int] | None = None
    dead_sessions: list[int] | None = None
    overdue: list[int] | None = None
    dags_with_free_slots: list[int] | None = None
    backfills: list[int] | None = None
    has_arrivals: bool | None = None
    next_wake: datetime | None = None
    has_gates: bool | None = None
    next_opening: datetime | None = None
    has_deliveries: bool | None = None
    has_requests: bool | None = None
    next_start: datetime | None = None
    marked_lsn: int | None = None
    is_synchronous: bool | None = None
    shard_count: int | None = None
    has_moves: bool | None = None
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LivenessChange:
    """Sessions whose heartbeats timed out, and ended sessions that still hold something."""

    silent_sessions: list[int]
    dead_sessions: list[int]


@dataclass(frozen=True, slots=True)
class Moved:
    """`is_over`: nothing is left to move, permanently. `is_closed`: and the shard is no longer led."""

    moved: int
    is_over: bool
    is_closed: bool


@sql_function(retries=False)
async def try_acquire_shard(
    conn: AsyncConnection, *, shard: int, owner: str, seconds: float, watches: bool
) -> AcquireResult:
    """Take the shard if it is free. `watches`: the session is not pooled, so that its end can be detected."""


async def acquire_shard(conn: AsyncConnection, *, shard: int, owner: str, seconds: float) -> int | None:
    """The new epoch, or None while another scheduler's lease lasts. The session is not monitored."""
    return (await try_acquire_shard(conn, shard=shard, owner=owner, seconds=seconds, watches=False)).epoch


@leader_verb
async def poll_work(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    lost_after: float,
    seconds: float | None = None,
    elapsed: float | None = None,
    watches: bool = False,
    is_watched: bool = False,
    system_id: int | None = None,
    timeline: int | None = None,
    lsn: int | None = None,
) -> PendingWork:
    """With `seconds` the lease is renewed, with `elapsed` missed heartbeats are counted. `watches`: our session may hold the
    session lock; `is_watched`: it does. The mark of the server is advanced along the way."""


@leader_verb
async def observe_heartbeats(
    conn: AsyncConnection, *, shard: int, epoch: int, elapsed: float, lost_after: float
) -> LivenessChange:
    """Count missed heartbeats up by `elapsed`, and return the sessions that are lost: a part of `poll_work`, which may fail."""


@sql_function(retries=False)
async def renew_shard(conn: AsyncConnection, *, shard: int, epoch: int, seconds: float) -> bool:
    """Renew only the lease, for when `poll_work` as a whole fails."""


@sql_function(retries=False)
async def release_shard(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    successor: str | None = None,
    successor_seconds: float | None = None,
) -> bool:
    """A graceful shutdown transfers leadership immediately instead of letting the lease expire. If the successor does not take the
    shard in time, any scheduler may."""


@sql_function(retries=False)
async def survey_shards(conn: AsyncConnection, *, owner: str, seconds: float, watches: bool) -> list[ShardStatus]:
    """The current assignment of shards; also registers this scheduler as live for `seconds`."""


@leader_verb
async def rebalance_shard(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> Moved: ...


@sql_function(retries=False)
async def set_shard_count(conn: AsyncConnection, *, shards: int, actor: Actor, if_never_chosen: bool) -> bool:
    """Whether it was written. `if_never_chosen`: only for a database whose number of shards was never set."""


async def set_shards(conn: AsyncConnection, *, shards: int, actor: Actor) -> None:
    """Effective from now on. Idempotent: repeating it only checks all rows once more."""
    if not 1 <= shards <= MOST_SHARDS:
        raise UserError(f"The number of shards must be from 1 to {MOST_SHARDS}; it is {shards}.")
    await set_shard_count(conn, shards=shards, actor=actor, if_never_chosen=False)
