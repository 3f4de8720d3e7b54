"""Retention: prunes old finished rows and moves logs to the archive, one bounded transaction at a time.

Only for the leader of the shard. Never a run that is open, locked or reopened; a run that the database refuses to delete
stays and blocks no other (V11).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeVar
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import retention as store
from evertick.db.queries.logs import ChunkKey, RunWithLogs
from evertick.domain.access import Actor
from evertick.domain.log_archive import Piece
from evertick.domain.retention import Chosen, Pace, choose
from evertick.engine.verbs import is_poison, leader_verb

T = TypeVar("T")


class Kind(StrEnum):
    """The kinds of pruned rows, by the names used in the journal and the metrics."""

    RUNS = "runs"
    JOURNAL = "journal"
    SKIP_RECORDS = "skip_records"
    ALERTS = "alerts"
    VIOLATIONS = "violations"
    NOTIFICATIONS = "notifications"
    BACKFILLS = "backfills"
    CAUSES = "causes"
    EVENTS = "events"
    ASSET_UPDATES = "asset_updates"
    STATE = "state"
    RUNNERS = "runners"
    DEPLOYMENTS = "deployments"
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
class SweepProgress:
    """`last` is where to continue: the same position again while dependent rows remain there."""

    rows: int
    last: int
    is_end: bool
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneGrant:
    """The leader in whose name rows are pruned, the cutoff, and this round's journal entry once there is one."""

    shard: int
    epoch: int
    before: datetime
    actor: Actor
    entry: int | None = None

    def with_entry(self, entry: int | None) -> PruneGrant:
        return replace(self, entry=entry)


@dataclass(frozen=True, slots=True)
class Pruned:
    pruned: int
    entry: int | None


@dataclass(frozen=True, slots=True)
class DeletedRows:
    """How many rows were deleted, and whether none are left."""

    swept: int
    is_clean: bool


@leader_verb
async def _prune_runs(conn: AsyncConnection, mandate: PruneGrant, run_ids: list[int]) -> Pruned: ...


@leader_verb
async def prune_audit_log(conn: AsyncConnection, mandate: PruneGrant, entry_ids: list[int]) -> Pruned: ...


@leader_verb
async def _prune_kind(conn: AsyncConnection, mandate: PruneGrant, *, kind: str, limit: int) -> Pruned: ...


@leader_verb
async def prune_versions(conn: AsyncConnection, mandate: PruneGrant, *, limit: int) -> Pruned: ...


@leader_verb
async def delete_pending_cleanup(
    conn: AsyncConnection, mandate: PruneGrant, *, kind: str, ids: list[int], limit: int
) -> DeletedRows: ...


async def prune_runs(conn: AsyncConnection, mandate: PruneGrant, *, after: int, pace: Pace, now: datetime) -> Walked:
    """Delete the old runs after `after`. Their dependent rows are left to `sweep`."""
    seen = await store.walk_runs(conn, after=after, batch=pace.batch)
    return await _prune(partial(_prune_runs, conn), mandate, choose(seen, after=after, before=mandate.before, now=now))


async def prune_journal(conn: AsyncConnection, mandate: PruneGrant, *, after: int, pace: Pace, now: datetime) -> Walked:
    seen = await store.walk_journal(conn, after=after, batch=pace.batch)
    chosen = choose(seen, after=after, before=mandate.before, now=now)
    return await _prune(partial(prune_audit_log, conn), mandate, chosen)


async def prune_kind(conn: AsyncConnection, mandate: PruneGrant, kind: Kind, *, pace: Pace) -> Pruned:
    """One batch of a kind that needs no walk. Fewer rows than the batch means that there are no more."""
    if kind in (Kind.RUNS, Kind.JOURNAL):
        raise ValueError(f"{kind} are pruned by walking over them")
    if kind is Kind.VERSIONS:
        return await prune_versions(conn, mandate, limit=pace.batch)
    return await _prune_kind(conn, mandate, kind=kind, limit=pace.batch)


async def sweep(
    conn: AsyncConnection, mandate: PruneGrant, kind: PendingCleanup, *, after: int, pace: Pace
) -> SweepProgress:
    """Delete dependent rows of pruned ones: at most as many as the pace allows."""
    ids = await store.pending_cleanup(conn, shard=mandate.shard, kind=kind, after=after, batch=pace.batch)
    done, refused = await _by_halves(
        lambda some: delete_pending_cleanup(conn, mandate, kind=kind, ids=some, limit=pace.rows), ids
    )
    is_clean = all(each.is_clean for each in done)
    last = ids[-1] if ids and is_clean else after
    rows = sum(each.swept for each in done)
    return SweepProgress(rows=rows, last=last, is_end=not ids, refused=tuple(refused))


async def _prune(
    verb: Callable[[PruneGrant, list[int]], Awaitable[Pruned]], mandate: PruneGrant, chosen: Chosen
) -> Walked:
    current = mandate

    async def some(part: list[int]) -> int:
        nonlocal current
        done = await verb(current, part)
        current = current.with_entry(done.entry)
        return done.pruned

    pruned, refused = await _by_halves(some, chosen.ids)
    return Walked(
        pruned=sum(pruned), last=chosen.last, is_end=chosen.is_end, entry=current.entry, refused=tuple(refused)
    )


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


class Leading(NamedTuple):
    """The leader in whose name logs are archived."""

    shard: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DeadObject:
    object_id: UUID
    run_id: int


@leader_verb
async def queue_log_archiving(conn: AsyncConnection, leading: Leading, *, limit: int) -> int:
    """Put the next runs on the watch list; returns their number."""


@leader_verb
async def create_archive_object(conn: AsyncConnection, leading: Leading, *, run_id: int, bytes: int) -> UUID:
    """To be called before the upload."""


@leader_verb
async def _archive_logs(
    conn: AsyncConnection, leading: Leading, *, object_id: UUID, pieces: list[dict[str, object]]
) -> int: ...


async def archive_logs(
    conn: AsyncConnection, leading: Leading, object_id: UUID, placed: Sequence[tuple[ChunkKey, Piece]]
) -> int:
    """After the upload: delete the lines, and store their position. Returns the number of chunks; 0 if the run is gone."""
    pieces = [
        {**key._asdict(), "at": piece.at, "bytes": piece.size, "digest": piece.digest.hex()} for key, piece in placed
    ]
    return await _archive_logs(conn, leading, object_id=object_id, pieces=pieces)


@leader_verb
async def _finish_log_archiving(
    conn: AsyncConnection, leading: Leading, *, run_ids: list[int], finished: list[datetime | None]
) -> None: ...


async def finish_log_archiving(conn: AsyncConnection, leading: Leading, done: Sequence[RunWithLogs]) -> None:
    """Take the runs off the watch list, unless they were reopened since."""
    run_ids, finished = [each.run_id for each in done], [each.finished_at for each in done]
    await _finish_log_archiving(conn, leading, run_ids=run_ids, finished=finished)


@leader_verb
async def orphaned_archive_objects(conn: AsyncConnection, leading: Leading, *, limit: int) -> list[DeadObject]:
    """Objects without lines. They stay on the list until they are deleted."""


@leader_verb
async def delete_archive_objects(conn: AsyncConnection, leading: Leading, object_ids: list[UUID]) -> None:
    """After their deletion."""
