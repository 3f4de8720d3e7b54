"""Schedules: the due ones, their next fires, and the skips."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.statements import all_rows, one_row, one_value, sql

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
    catchup_limit: int | None
    overlap: str
    start_within: float | None
    finish_within: float | None
    delay_seconds: float
    read_at: datetime


@dataclass(frozen=True, slots=True)
class DagSchedule:
    """`spec` as it is stored: one that cannot be decoded must still be changeable."""

    schedule_id: int
    version: int
    next_due: datetime | None
    spec: str
    misfire: str
    window_seconds: float
    catchup_limit: int | None
    overlap: str
    start_within: float | None
    finish_within: float | None
    delay_seconds: float
    name: str
    params: JsonObject
    paused: bool
    is_held: bool
    origin: str
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
    is_held: bool
    error: str | None
    misfire: str
    window_seconds: float
    catchup_limit: int | None
    overlap: str
    start_within: float | None
    finish_within: float | None
    delay_seconds: float
    params: JsonObject
    origin: str
    changed_by: str
    changed_at: datetime
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True)
class ScheduleVersion:
    version: int
    change: str
    changed_by: str
    changed_at: datetime
    origin: str
    is_held: bool
    settings: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChange:
    """The schedule's DAG, the expected version (None: any), its state when the change was planned, and the due fires."""

    dag_id: int
    actor: str
    expected: int | None
    seen: list[list[object]]
    settle: list[JsonObject]


@dataclass(frozen=True, slots=True)
class DependenciesDelivered:
    became_due: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class DependencyWait:
    """One schedule that depends on other DAGs or assets. `condition` as it is stored."""

    dag: str
    name: str
    origin: str
    condition: str


@dataclass(frozen=True, slots=True)
class Outlet:
    dag: str
    asset: str


@dataclass(frozen=True, slots=True)
class RunTrigger:
    """The kind, the DAG or asset, and the run that ended or updated it, or the actor of an external update."""

    kind: str
    name: str
    run_id: int | None
    occurred_at: datetime
    updated_by: str | None


@dataclass(frozen=True, slots=True)
class FireResult:
    """`won`: the schedules that advanced. `overlapped`: fires skipped because a run was open. `canceled`: tasks of
    such runs that received a stop request."""

    won: list[int]
    overlapped: int
    canceled: int


@dataclass(frozen=True, slots=True)
class Skip:
    dag: str
    name: str
    first_at: datetime
    last_at: datetime
    count: int
    reason: str
    recorded_at: datetime


async def due(
    conn: AsyncConnection,
    *,
    shard: int,
    batch: int,
    passed_over: Collection[int] = (),
    half: int | None = None,
    until: datetime | None = None,
) -> list[DueSchedule]:
    """Oldest first, without the ids in `passed_over`; only even (0) or odd (1) ids if a half is named. Due now, or
    `until` a future instant, which is then their `read_at`."""
    params = {"shard": shard, "batch": batch, "passed_over": list(passed_over), "half": half, "until": until}
    return await all_rows(conn, sql("schedules", "due"), params, DueSchedule)


async def next_due(conn: AsyncConnection, *, shard: int) -> tuple[datetime | None, datetime]:
    """The next instant at which a schedule fires, and the database's time now."""
    cursor = await conn.execute(sql("schedules", "next_due"), {"shard": shard})
    return cast("tuple[datetime | None, datetime]", await cursor.fetchone())


async def fire(conn: AsyncConnection, *, shard: int, epoch: int, plans: list[JsonObject]) -> FireResult:
    """Schedules that are not in `won` had already been advanced by another process."""
    params = {"shard": shard, "epoch": epoch, "plans": Jsonb(plans)}
    return cast(FireResult, await one_row(conn, sql("schedules", "fire"), params, FireResult))


async def deliver_dependencies(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> DependenciesDelivered:
    params = {"shard": shard, "epoch": epoch, "batch": batch}
    return cast(DependenciesDelivered, await one_row(conn, sql("schedules", "hear"), params, DependenciesDelivered))


async def waits(conn: AsyncConnection) -> list[DependencyWait]:
    return await all_rows(conn, sql("schedules", "waits"), {}, DependencyWait)


async def outlets(conn: AsyncConnection, *, dags: Collection[str]) -> list[Outlet]:
    return await all_rows(conn, sql("schedules", "outlets"), {"dags": list(dags)}, Outlet)


async def causes(conn: AsyncConnection, run_id: int) -> list[RunTrigger]:
    return await all_rows(conn, sql("schedules", "causes"), {"run_id": run_id}, RunTrigger)


async def settle(conn: AsyncConnection, *, plans: list[JsonObject]) -> FireResult:
    return cast(FireResult, await one_row(conn, sql("schedules", "settle"), {"plans": Jsonb(plans)}, FireResult))


async def quarantine_schedule(
    conn: AsyncConnection, *, shard: int, epoch: int, due: DueSchedule, reason: str, is_tried_again: bool
) -> bool:
    """Whether that version was current and not quarantined before."""
    params = {
        "shard": shard,
        "epoch": epoch,
        "schedule_id": due.schedule_id,
        "version": due.version,
        "reason": reason.replace("\x00", ""),
        "is_tried_again": is_tried_again,
    }
    return bool(await one_value(conn, sql("schedules", "set_aside"), params))


async def of_dag(conn: AsyncConnection, *, dag: str, name: str | None = None) -> list[DagSchedule]:
    """All of a DAG's, or the one with that name."""
    return await all_rows(conn, sql("schedules", "of_dag"), {"dag": dag, "name": name}, DagSchedule)


async def list_all(conn: AsyncConnection, *, dag: str | None = None, limit: int = 200) -> list[ListedSchedule]:
    params = {"dag": dag, "limit": limit}
    return await all_rows(conn, sql("schedules", "list"), params, ListedSchedule)


async def of_dags(conn: AsyncConnection, dag_ids: list[int], *, limit: int = 100_000) -> list[ListedSchedule]:
    return await all_rows(conn, sql("schedules", "of_dags"), {"dag_ids": dag_ids, "limit": limit}, ListedSchedule)


async def page(
    conn: AsyncConnection, *, dag_ids: list[int] | None, after: tuple[str, str], limit: int, deleted: bool = False
) -> list[ListedSchedule]:
    """Of these DAGs, or of all."""
    params = {"dag_ids": dag_ids, "dag": after[0], "name": after[1], "limit": limit, "deleted": deleted}
    return await all_rows(conn, sql("schedules", "page"), params, ListedSchedule)


async def skips(
    conn: AsyncConnection,
    *,
    dag: str | None = None,
    dag_ids: list[int] | None = None,
    name: str | None = None,
    limit: int = 50,
) -> list[Skip]:
    """Latest first."""
    wanted = {"dag": dag, "dag_ids": dag_ids, "name": name, "limit": limit}
    return await all_rows(conn, sql("schedules", "skips"), wanted, Skip)


async def history(conn: AsyncConnection, *, dag: str, name: str, limit: int = 50) -> list[ScheduleVersion]:
    """Latest first; also for a deleted schedule."""
    params = {"dag": dag, "name": name, "limit": limit}
    return await all_rows(conn, sql("schedules", "history"), params, ScheduleVersion)


async def put(
    conn: AsyncConnection, made: ScheduleChange, *, schedule: JsonObject, request: str | None, origin: str
) -> int | None:
    """The schedule's new version, or None if it was not at the expected one."""
    params = {**_params(made), "schedule": Jsonb(schedule), "request": request, "origin": origin}
    return cast("int | None", await one_value(conn, sql("schedules", "put"), params))


async def change(conn: AsyncConnection, made: ScheduleChange, *, name: str, change: str) -> int | None:
    """Pause, unpause or delete one schedule. Its new version, or None if it was not at the expected one."""
    params = {**_params(made), "name": name, "change": change}
    return cast("int | None", await one_value(conn, sql("schedules", "change"), params))


def _params(made: ScheduleChange) -> dict[str, object]:
    return {
        "dag_id": made.dag_id,
        "expected": made.expected,
        "seen": Jsonb(made.seen),
        "settle": Jsonb(made.settle),
        "actor": made.actor,
    }
