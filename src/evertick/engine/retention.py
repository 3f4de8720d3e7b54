"""Retention: prunes old finished rows and moves logs to the archive, one bounded transaction at a time.

Only for the leader of the shard. Never a run that is open, locked or reopened; a run that the database refuses to delete
stays and blocks no other (V11).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import logs
from evertick.db.queries import retention as store
from evertick.db.queries.logs import ChunkKey, DeadObject, EndedRun, Leading
from evertick.db.queries.retention import Pruned, PruneGrant
from evertick.domain.log_archive import Piece
from evertick.domain.retention import Pace, choose
from evertick.engine.verbs import as_leader, is_poison

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


class PendingCleanup(StrEnum):
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


async def prune_runs(conn: AsyncConnection, mandate: PruneGrant, *, after: int, pace: Pace, now: datetime) -> Walked:
    """Delete the old runs after `after`. Their dependent rows are left to `sweep`."""
    seen = await store.walk_runs(conn, after=after, batch=pace.batch)
    chosen = choose(seen, after=after, before=mandate.before, now=now)
    pruned, entry, refused = await _prune(lambda m, ids: store.prune_runs(conn, m, ids), mandate, chosen.ids)
    return Walked(pruned=pruned, last=chosen.last, is_end=chosen.is_end, entry=entry, refused=refused)


async def prune_journal(conn: AsyncConnection, mandate: PruneGrant, *, after: int, pace: Pace, now: datetime) -> Walked:
    seen = await store.walk_journal(conn, after=after, batch=pace.batch)
    chosen = choose(seen, after=after, before=mandate.before, now=now)
    pruned, entry, refused = await _prune(lambda m, ids: store.prune_journal(conn, m, ids), mandate, chosen.ids)
    return Walked(pruned=pruned, last=chosen.last, is_end=chosen.is_end, entry=entry, refused=refused)


async def prune_kind(conn: AsyncConnection, mandate: PruneGrant, kind: Kind, *, pace: Pace) -> Pruned:
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


async def sweep(conn: AsyncConnection, mandate: PruneGrant, kind: PendingCleanup, *, after: int, pace: Pace) -> Swept:
    """Delete dependent rows of pruned ones: at most as many as the pace allows."""
    ids = await store.pending_cleanup(conn, shard=mandate.shard, kind=kind, after=after, batch=pace.batch)
    done, refused = await _by_halves(
        lambda some: _fenced(mandate, lambda: store.sweep(conn, mandate, kind, some, pace.rows)), ids
    )
    is_clean = all(each.is_clean for each in done)
    last = ids[-1] if ids and is_clean else after
    rows = sum(each.swept for each in done)
    return Swept(rows=rows, last=last, is_end=not ids, refused=tuple(refused))


async def _prune(
    verb: Callable[[PruneGrant, list[int]], Awaitable[Pruned]], mandate: PruneGrant, ids: list[int]
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


async def _fenced(mandate: PruneGrant, work: Callable[[], Awaitable[T]]) -> T:
    return await as_leader(work, shard=mandate.shard, epoch=mandate.epoch)


async def watch_runs(conn: AsyncConnection, leading: Leading, *, batch: int) -> int:
    """Put the next runs on the watch list; returns their number."""
    return await as_leader(lambda: logs.watch(conn, leading, batch=batch), **leading._asdict())


async def list_object(conn: AsyncConnection, leading: Leading, *, run_id: int, size: int) -> UUID:
    """To be called before the upload."""
    return await as_leader(lambda: logs.list_object(conn, leading, run_id=run_id, bytes_=size), **leading._asdict())


async def move_lines(
    conn: AsyncConnection, leading: Leading, object_id: UUID, placed: Sequence[tuple[ChunkKey, Piece]]
) -> int:
    """After the upload: delete the lines, and store their position. Returns the number of chunks; 0 if the run is gone."""
    return await as_leader(lambda: logs.move(conn, leading, object_id, placed), **leading._asdict())


async def leave_runs(conn: AsyncConnection, leading: Leading, done: Sequence[EndedRun]) -> None:
    """Take the runs off the watch list, unless they were reopened since."""
    await as_leader(lambda: logs.unwatch(conn, leading, done), **leading._asdict())


async def dead_objects(conn: AsyncConnection, leading: Leading, *, batch: int) -> list[DeadObject]:
    """Objects without lines. They stay on the list until they are deleted."""
    return await as_leader(lambda: logs.dead(conn, leading, batch=batch), **leading._asdict())


async def forget_objects(conn: AsyncConnection, leading: Leading, object_ids: Sequence[UUID]) -> None:
    """After their deletion."""
    await as_leader(lambda: logs.forget(conn, leading, object_ids), **leading._asdict())
