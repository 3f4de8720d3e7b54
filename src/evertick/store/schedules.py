"""Schedules as they stand: what is due, what is next, what was skipped."""

from __future__ import annotations

from collections.abc import Collection
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
    """`spec` as it is stored: one that cannot be decoded must not keep the others from being read. `read_at`: the clock."""

    schedule_id: int
    version: int
    next_due: datetime
    spec: str
    misfire: str
    window_seconds: float
    read_at: datetime


@dataclass(frozen=True, slots=True)
class DagSchedule:
    """`spec` as it is stored: one that cannot be decoded must not keep it from being changed."""

    schedule_id: int
    version: int
    next_due: datetime | None
    spec: str
    misfire: str
    window_seconds: float
    name: str
    params: JsonObject
    paused: bool
    error: str | None


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


async def due(conn: AsyncConnection, *, shard: int, batch: int, passed_over: Collection[int] = ()) -> list[DueSchedule]:
    """Oldest first, without those in `passed_over`."""
    params = {"shard": shard, "batch": batch, "passed_over": list(passed_over)}
    return await all_rows(conn, sql("schedules", "due"), params, DueSchedule)


async def next_due(conn: AsyncConnection, *, shard: int) -> tuple[datetime | None, datetime]:
    """The next instant at which a schedule fires, and the database's time now."""
    cursor = await conn.execute(sql("schedules", "next_due"), {"shard": shard})
    return cast("tuple[datetime | None, datetime]", await cursor.fetchone())


async def fire(conn: AsyncConnection, *, shard: int, epoch: int, plans: list[JsonObject]) -> list[int]:
    """Which schedules fired; the others had moved on."""
    params = {"shard": shard, "epoch": epoch, "plans": Jsonb(plans)}
    return cast("list[int]", await one_value(conn, sql("schedules", "fire"), params))


async def set_aside(
    conn: AsyncConnection, *, shard: int, epoch: int, due: DueSchedule, reason: str, is_tried_again: bool
) -> bool:
    """Whether it was that version's turn, and it had not been set aside before."""
    params = {
        "shard": shard,
        "epoch": epoch,
        "schedule_id": due.schedule_id,
        "version": due.version,
        "reason": reason.replace("\x00", ""),
        "is_tried_again": is_tried_again,
    }
    return bool(await one_value(conn, sql("schedules", "set_aside"), params))


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
