"""The DAG catalogue: a page of DAGs, their newest runs, and the grid of one DAG. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`tags`: any of them, and `tag` as well. `like`: a LIKE pattern. `newest`: the state of the newest run."""

    tags: list[str] | None = None
    tag: str | None = None
    like: str | None = None
    paused: bool | None = None
    newest: str | None = None


@dataclass(frozen=True, slots=True)
class ListedDag:
    dag_id: int
    name: str
    paused: bool
    version: int
    task_count: int
    tags: list[str]
    description: str | None
    file: str


@dataclass(frozen=True, slots=True)
class NewestRun:
    dag_id: int
    run_id: int
    state: str
    created_at: datetime
    fire_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class NextFire:
    dag_id: int
    name: str
    spec: JsonObject
    next_due: datetime | None
    paused: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class GridRun:
    run_id: int
    version: int
    kind: str
    fire_at: datetime | None
    created_at: datetime
    state: str
    started_at: datetime | None
    finished_at: datetime | None
    task_count: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """The number of instances of a task of a run in one state."""

    run_id: int
    task: str
    state: str
    count: int
    is_mapped: bool
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int


async def page(conn: AsyncConnection, wanted: Wanted, *, after: str, limit: int) -> list[ListedDag]:
    params = {**asdict(wanted), "after": after, "limit": limit}
    return await all_rows(conn, sql("catalogue", "page"), params, ListedDag)


async def sorted_page(
    conn: AsyncConnection, wanted: Wanted, *, by: str, is_down: bool, offset: int, limit: int
) -> list[ListedDag]:
    """`by`: name, next, newest or took. DAGs without a value come last."""
    params = {**asdict(wanted), "by": by, "is_down": is_down, "offset": offset, "limit": limit}
    return await all_rows(conn, sql("catalogue", "sorted_page"), params, ListedDag)


async def newest_runs(conn: AsyncConnection, *, dag_ids: Sequence[int], each: int) -> list[NewestRun]:
    """The newest `each` runs of each DAG, oldest first."""
    params = {"dag_ids": list(dag_ids), "each": each}
    return await all_rows(conn, sql("catalogue", "newest_runs"), params, NewestRun)


async def next_fires(conn: AsyncConnection, *, dag_ids: Sequence[int]) -> list[NextFire]:
    return await all_rows(conn, sql("catalogue", "next_fires"), {"dag_ids": list(dag_ids)}, NextFire)


async def grid(conn: AsyncConnection, *, dag_id: int, before: int, limit: int) -> list[GridRun]:
    """Newest first."""
    params = {"dag_id": dag_id, "before": before, "limit": limit}
    return await all_rows(conn, sql("catalogue", "grid"), params, GridRun)


async def cells(conn: AsyncConnection, *, run_ids: Sequence[int], limit: int) -> list[GridCell]:
    return await all_rows(conn, sql("catalogue", "cells"), {"run_ids": list(run_ids), "limit": limit}, GridCell)


async def group_retries(conn: AsyncConnection, *, run_ids: Sequence[int]) -> dict[tuple[int, str], int]:
    """The number of retries of each group, by run and name; groups without a retry are omitted."""
    cursor = await conn.execute(sql("catalogue", "group_retries"), {"run_ids": list(run_ids)})
    return {(run_id, name): retried for run_id, name, retried in await cursor.fetchall()}
