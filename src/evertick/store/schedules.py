"""Schedules as they stand: what is due, what is next, what was skipped."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class DueSchedule:
    schedule_id: int
    version: int
    next_due: datetime
    spec: JsonObject
    misfire: str
    window_seconds: float


@dataclass(frozen=True, slots=True)
class DagSchedule:
    schedule_id: int
    version: int
    next_due: datetime | None
    spec: JsonObject
    misfire: str
    window_seconds: float
    name: str
    params: JsonObject
    paused: bool


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    schedule_id: int
    dag: str
    name: str
    version: int
    spec: JsonObject
    next_due: datetime | None
    last_fired: datetime | None
    paused: bool
    error: str | None
    misfire: str


@dataclass(frozen=True, slots=True)
class Skip:
    first_at: datetime
    last_at: datetime
    count: int
    reason: str
    recorded_at: datetime


async def due(conn: AsyncConnection, *, shard: int, batch: int) -> list[DueSchedule]:
    return await all_rows(conn, sql("schedules", "due"), {"shard": shard, "batch": batch}, DueSchedule)


async def next_due(conn: AsyncConnection, *, shard: int) -> tuple[datetime | None, datetime]:
    """The next instant at which a schedule fires, and the database's time now."""
    cursor = await conn.execute(sql("schedules", "next_due"), {"shard": shard})
    return cast("tuple[datetime | None, datetime]", await cursor.fetchone())


async def fire(conn: AsyncConnection, *, shard: int, epoch: int, plans: list[JsonObject]) -> list[int]:
    """Which schedules fired; the others had moved on."""
    params = {"shard": shard, "epoch": epoch, "plans": Jsonb(plans)}
    return cast("list[int]", await one_value(conn, sql("schedules", "fire"), params))


async def quarantine(conn: AsyncConnection, *, schedule_id: int, version: int, error: str) -> None:
    await conn.execute(
        sql("schedules", "quarantine"), {"schedule_id": schedule_id, "version": version, "error": error[:2000]}
    )


async def of_dag(conn: AsyncConnection, *, dag: str) -> list[DagSchedule]:
    return await all_rows(conn, sql("schedules", "of_dag"), {"dag": dag}, DagSchedule)


async def list_all(conn: AsyncConnection, *, dag: str | None = None, limit: int = 200) -> list[ListedSchedule]:
    return await all_rows(conn, sql("schedules", "list"), {"dag": dag, "limit": limit}, ListedSchedule)


async def skips(conn: AsyncConnection, *, schedule_id: int, limit: int = 50) -> list[Skip]:
    return await all_rows(conn, sql("schedules", "skips"), {"schedule_id": schedule_id, "limit": limit}, Skip)


async def put(
    conn: AsyncConnection,
    *,
    dag_id: int,
    schedule: JsonObject,
    expected: int | None,
    request: str | None,
    settle: list[JsonObject],
    actor: str,
) -> int | None:
    """The schedule's new version, or None if it was not at the expected one."""
    params = {
        "dag_id": dag_id,
        "schedule": Jsonb(schedule),
        "expected": expected,
        "request": request,
        "settle": Jsonb(settle),
        "actor": actor,
    }
    return cast("int | None", await one_value(conn, sql("schedules", "put"), params))
