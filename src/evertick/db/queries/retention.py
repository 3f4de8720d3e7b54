"""Retention: walks over old rows and deletes them. Decided elsewhere; the SQL functions check each row again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import LiteralString, cast

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, one_row, one_value, sql
from evertick.domain.retention import Dated


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneGrant:
    """The leader in whose name rows are pruned, the cutoff, and this round's journal entry once there is one."""

    shard: int
    epoch: int
    before: datetime
    actor: str
    entry: int | None = None

    def with_entry(self, entry: int | None) -> PruneGrant:
        return replace(self, entry=entry)


@dataclass(frozen=True, slots=True)
class Pruned:
    pruned: int
    entry: int | None


@dataclass(frozen=True, slots=True)
class Swept:
    """How many rows were deleted, and whether none are left."""

    swept: int
    is_clean: bool


@dataclass(frozen=True, slots=True)
class Old:
    journal: int
    skip_records: int


async def walk_runs(conn: AsyncConnection, *, after: int, batch: int) -> list[Dated]:
    return await all_rows(conn, sql("retention", "walk_runs"), {"after": after, "batch": batch}, Dated)


async def walk_journal(conn: AsyncConnection, *, after: int, batch: int) -> list[Dated]:
    return await all_rows(conn, sql("retention", "walk_journal"), {"after": after, "batch": batch}, Dated)


async def run_at_or_above(conn: AsyncConnection, run_id: int) -> Dated | None:
    return await one_row(conn, sql("retention", "run_at_or_above"), {"id": run_id}, Dated)


async def newest_run_id(conn: AsyncConnection) -> int:
    """0 if there is none."""
    return cast("int | None", await one_value(conn, sql("retention", "newest_run_id"), {})) or 0


async def pending_cleanup(conn: AsyncConnection, *, shard: int, kind: str, after: int, batch: int) -> list[int]:
    params = {"shard": shard, "kind": kind, "after": after, "batch": batch}
    cursor = await conn.execute(sql("retention", "remains"), params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def prune_runs(conn: AsyncConnection, mandate: PruneGrant, ids: list[int]) -> Pruned:
    return await _prune(conn, sql("retention", "prune_runs"), mandate, ids=ids)


async def prune_journal(conn: AsyncConnection, mandate: PruneGrant, ids: list[int]) -> Pruned:
    return await _prune(conn, sql("retention", "prune_journal"), mandate, ids=ids)


async def prune_kind(conn: AsyncConnection, mandate: PruneGrant, kind: str, batch: int) -> Pruned:
    return await _prune(conn, sql("retention", "prune_kind"), mandate, kind=kind, batch=batch)


async def prune_versions(conn: AsyncConnection, mandate: PruneGrant, batch: int) -> Pruned:
    return await _prune(conn, sql("retention", "prune_versions"), mandate, batch=batch)


async def sweep(conn: AsyncConnection, mandate: PruneGrant, kind: str, ids: list[int], rows: int) -> Swept:
    params = {"shard": mandate.shard, "epoch": mandate.epoch, "kind": kind, "ids": ids, "rows": rows}
    row = await one_row(conn, sql("retention", "sweep"), params, Swept)
    assert row is not None
    return row


async def count_old(conn: AsyncConnection, *, before: datetime) -> Old:
    row = await one_row(conn, sql("retention", "count_old"), {"before": before}, Old)
    assert row is not None
    return row


async def _prune(conn: AsyncConnection, statement: LiteralString, mandate: PruneGrant, **what: object) -> Pruned:
    params = {
        "shard": mandate.shard,
        "epoch": mandate.epoch,
        "before": mandate.before,
        "actor": mandate.actor,
        "entry": mandate.entry,
        **what,
    }
    row = await one_row(conn, statement, params, Pruned)
    assert row is not None
    return row
