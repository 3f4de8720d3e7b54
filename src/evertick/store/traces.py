"""Finished runs with their attempts, for traces."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class EndedRun:
    run_id: int
    dag: str
    version: int
    kind: str
    fire_at: datetime | None
    created_at: datetime
    state: str
    finished_at: datetime
    reason: str | None


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    run_id: int
    idx: int
    map_index: int
    task: str
    queue: str
    epoch: int
    attempt: int
    outcome: str
    reason: str | None
    started_at: datetime
    finished_at: datetime
    runner_id: str | None
    host: str | None
    ready_at: datetime


async def newest(conn: AsyncConnection) -> int:
    return cast(int, await one_value(conn, sql("traces", "newest"), {}))


async def open_runs(conn: AsyncConnection, *, limit: int) -> set[int]:
    cursor = await conn.execute(sql("traces", "open_runs"), {"limit": limit})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def ended_after(conn: AsyncConnection, after: int, *, limit: int) -> list[int]:
    cursor = await conn.execute(sql("traces", "ended_after"), {"after": after, "limit": limit})
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def runs(conn: AsyncConnection, run_ids: list[int]) -> list[EndedRun]:
    """The finished ones of these runs."""
    return await all_rows(conn, sql("traces", "runs"), {"run_ids": run_ids}, EndedRun)


async def attempts(conn: AsyncConnection, run_ids: list[int], *, limit: int) -> list[EndedAttempt]:
    return await all_rows(conn, sql("traces", "attempts"), {"run_ids": run_ids, "limit": limit}, EndedAttempt)
