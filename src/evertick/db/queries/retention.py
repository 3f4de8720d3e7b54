"""Retention: walks over old rows and deletes them. Decided elsewhere; the SQL functions check each row again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query
from evertick.domain.retention import Dated


@dataclass(frozen=True, slots=True)
class Old:
    journal: int
    skip_records: int


@query
async def walk_runs(conn: AsyncConnection, *, after: int, batch: int) -> list[Dated]: ...


@query
async def walk_journal(conn: AsyncConnection, *, after: int, batch: int) -> list[Dated]: ...


@query
async def run_at_or_above(conn: AsyncConnection, run_id: int) -> Dated | None: ...


@query
async def newest_run_id(conn: AsyncConnection) -> int | None: ...


@query
async def pending_cleanup(conn: AsyncConnection, *, shard: int, kind: str, after: int, batch: int) -> list[int]: ...


@query
async def count_old(conn: AsyncConnection, *, before: datetime) -> Old: ...
