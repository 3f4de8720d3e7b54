"""Schedules: the due ones, their next fires, and the skips."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from psycopg import AsyncConnection

from evertick.db.statements import query

JsonObject = dict[str, object]


ReadyPartition: TypeAlias = tuple[str, str, str | None]  # its fire, its key, and its date


@dataclass(frozen=True, slots=True)
class DueSchedule:
    """`spec` as it is stored: one that cannot be decoded must not keep the others from being read. `ready`: the fires of complete
    partitions, each with its key and date. `read_at`: the clock."""

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
    ready: list[ReadyPartition] | None
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
    ready: list[ReadyPartition] | None
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


@dataclass(frozen=True, slots=True)
class RunningOut:
    """A computed schedule, and its last stored instant."""

    dag: str
    name: str
    until: datetime


@dataclass(frozen=True, slots=True)
class DependencyWait:
    """One schedule that depends on other DAGs or assets. `condition` as it is stored."""

    dag: str
    name: str
    origin: str
    condition: str


@dataclass(frozen=True, slots=True)
class RunTrigger:
    """The kind, the DAG or asset, and the run that ended or updated it, or the actor of an external update."""

    kind: str
    name: str
    run_id: int | None
    occurred_at: datetime
    updated_by: str | None


@dataclass(frozen=True, slots=True)
class SkipRecord:
    dag: str
    name: str
    first_at: datetime
    last_at: datetime
    count: int
    reason: str
    recorded_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipPlace:
    """The last record of the page before."""

    recorded_before: str | None = None
    first_before: str | None = None
    dag_before: str | None = None
    name_before: str | None = None


_LATEST_SKIP = SkipPlace()


@query
async def due(
    conn: AsyncConnection,
    *,
    shard: int,
    batch: int,
    passed_over: list[int],
    half: int | None = None,
    until: datetime | None = None,
) -> list[DueSchedule]:
    """Oldest first, without the ids in `passed_over`; only even (0) or odd (1) ids if a half is named. Due now, or
    `until` a future instant, which is then their `read_at`."""


@query
async def next_due(conn: AsyncConnection, *, shard: int) -> tuple[datetime | None, datetime]:
    """The next instant at which a schedule fires, and the database's time now."""


@query
async def running_out(conn: AsyncConnection, *, fewest: int) -> list[RunningOut]: ...


@query
async def waits(conn: AsyncConnection) -> list[DependencyWait]: ...


@query
async def outlets(conn: AsyncConnection, *, dags: list[str]) -> list[tuple[str, str]]:
    """DAGs, and the assets that they update."""


@query
async def causes(conn: AsyncConnection, run_id: int) -> list[RunTrigger]: ...


@query
async def of_dag(conn: AsyncConnection, *, dag: str, name: str | None = None) -> list[DagSchedule]:
    """All of a DAG's, or the one with that name."""


@query
async def list_all(conn: AsyncConnection, *, dag: str | None = None, limit: int = 200) -> list[ListedSchedule]: ...


@query
async def of_dags(conn: AsyncConnection, dag_ids: list[int], *, limit: int = 100000) -> list[ListedSchedule]: ...


@query
async def page(
    conn: AsyncConnection, *, dag_ids: list[int] | None, dag: str, name: str, limit: int, deleted: bool = False
) -> list[ListedSchedule]:
    """Of these DAGs, or of all; after the schedule of that name."""


@query
async def skips(
    conn: AsyncConnection,
    *,
    dag: str | None = None,
    dag_ids: list[int] | None = None,
    name: str | None = None,
    limit: int = 50,
    before: SkipPlace = _LATEST_SKIP,
) -> list[SkipRecord]:
    """Latest first."""


@query
async def history(
    conn: AsyncConnection, *, dag: str, name: str, limit: int = 50, before: int = 2**31 - 1
) -> list[ScheduleVersion]:
    """Latest first; also for a deleted schedule."""
