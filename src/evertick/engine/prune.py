"""prune: deletes old finished rows, one bounded transaction at a time. Only for the leader of the shard.

Never a run that is open, locked or reopened. A run that the database refuses to delete stays and blocks no other (V11).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

import psycopg
from psycopg import AsyncConnection

from evertick.domain.retention import Pace, choose
from evertick.engine.fenced import as_leader, is_poison
from evertick.store import prune as store
from evertick.store.prune import Mandate, Pruned

T = TypeVar("T")


class Kind(StrEnum):
    """The kinds of pruned rows, by the names used in the journal and the metrics."""

    RUNS = "runs"
    JOURNAL = "journal"
    SKIP_RECORDS = "skip_records"
    ALERTS = "alerts"
    NOTIFICATIONS = "notifications"
    BACKFILLS = "backfills"
    CAUSES = "causes"
    EVENTS = "events"
    ASSET_UPDATES = "asset_updates"
    RUNNERS = "runners"
    VERSIONS = "versions"
    BUNDLES = "bundles"


class Remains(StrEnum):
    """The kinds of rows that may have dependent rows left after they were pruned."""

    RUN = "run"
    VERSION = "version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """One batch of a walk: the deleted rows, the new position, whether it reached the end, and the refused rows."""

    pruned: int
    last: int
    is_end: bool
    entry: int | None
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """`last` is where to continue: the same position again while dependent rows remain there."""

    rows: int
    last: int
    is_end: bool
    refused: tuple[int, ...] = ()


async def prune_runs(conn: AsyncConnection, mandate: Mandate, *, after: int, pace: Pace, now: datetime) -> Walked:
    """Delete the old runs after `after`. Their dependent rows are left to `sweep`."""
    seen = await store.walk_runs(conn, after=after, batch=pace.batch)
    chosen = choose(seen, after=after, before=mandate.before, now=now)
    pruned, entry, refused = await _prune(lambda m, ids: store.prune_runs(conn, m, ids), mandate, chosen.ids)
    return Walked(pruned=pruned, last=chosen.last, is_end=chosen.is_end, entry=entry, refused=refused)


async def prune_journal(conn: AsyncConnection, mandate: Mandate, *, after: int, pace: Pace, now: datetime) -> Walked:
    seen = await store.walk_journal(conn, after=after, batch=pace.batch)
    chosen = choose(seen, after=after, before=mandate.before, now=now)
    pruned, entry, refused = await _prune(lambda m, ids: store.prune_journal(conn, m, ids), mandate, chosen.ids)
    return Walked(pruned=pruned, last=chosen.last, is_end=chosen.is_end, entry=entry, refused=refused)


async def prune_kind(conn: AsyncConnection, mandate: Mandate, kind: Kind, *, pace: Pace) -> Pruned:
    """One batch of a kind that needs no walk. Fewer rows than the batch means that there are no more."""
    match kind:
        case Kind.RUNS | Kind.JOURNAL:
            raise ValueError(f"{kind} are pruned by walking over them")
        case Kind.VERSIONS:
            return await _fenced(mandate, lambda: store.prune_versions(conn, mandate, pace.batch))
        case (
            Kind.SKIP_RECORDS
            | Kind.ALERTS
            | Kind.NOTIFICATIONS
            | Kind.BACKFILLS
            | Kind.CAUSES
            | Kind.EVENTS
            | Kind.ASSET_UPDATES
            | Kind.RUNNERS
            | Kind.BUNDLES
        ):
            return await _fenced(mandate, lambda: store.prune_kind(conn, mandate, kind, pace.batch))


async def sweep(conn: AsyncConnection, mandate: Mandate, kind: Remains, *, after: int, pace: Pace) -> Swept:
    """Delete dependent rows of pruned ones: at most as many as the pace allows."""
    ids = await store.remains(conn, shard=mandate.shard, kind=kind, after=after, batch=pace.batch)
    done, refused = await _by_halves(
        lambda some: _fenced(mandate, lambda: store.sweep(conn, mandate, kind, some, pace.rows)), ids
    )
    is_clean = all(each.is_clean for each in done)
    last = ids[-1] if ids and is_clean else after
    rows = sum(each.swept for each in done)
    return Swept(rows=rows, last=last, is_end=not ids, refused=tuple(refused))


async def _prune(
    verb: Callable[[Mandate, list[int]], Awaitable[Pruned]], mandate: Mandate, ids: list[int]
) -> tuple[int, int | None, tuple[int, ...]]:
    """The number of deleted rows, the journal entry, and the rows that the database refused to delete."""
    current = mandate

    async def some(part: list[int]) -> int:
        nonlocal current
        done = await _fenced(current, lambda: verb(current, part))
        current = current.with_entry(done.entry)
        return done.pruned

    pruned, refused = await _by_halves(some, ids)
    return sum(pruned), current.entry, tuple(refused)


async def _by_halves(work: Callable[[list[int]], Awaitable[T]], ids: list[int]) -> tuple[list[T], list[int]]:
    """All at once; if the database refuses, in halves, until the refused one is alone and left out."""
    if not ids:
        return [], []
    try:
        return [await work(ids)], []
    except psycopg.Error as error:
        if not is_poison(error.sqlstate):
            raise
        if len(ids) == 1:
            return [], ids
    middle = len(ids) // 2
    first, refused = await _by_halves(work, ids[:middle])
    second, refused_too = await _by_halves(work, ids[middle:])
    return first + second, refused + refused_too


async def _fenced(mandate: Mandate, work: Callable[[], Awaitable[T]]) -> T:
    return await as_leader(work, shard=mandate.shard, epoch=mandate.epoch)
