"""The figures of DAGs and tasks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query


@dataclass(frozen=True, slots=True)
class FigureRow:
    """Sums since the first run. Those of seconds are of tasks that succeeded. `task` is empty for runs as a whole;
    `durations` are those of the latest ones, the newest first."""

    dag: str
    task: str
    succeeded: int
    failed: int
    other: int
    retries: int
    duration_seconds: float
    wait_seconds: float
    landed: int
    landing_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int | None
    durations: list[float]
    counted_at: datetime


@query
async def of_dags(conn: AsyncConnection, *, after: str, dag_ids: list[int] | None, limit: int) -> list[FigureRow]: ...


@query
async def of_tasks(
    conn: AsyncConnection, *, dag_id: int, after: str, is_first: bool, limit: int
) -> list[FigureRow]: ...


@dataclass(frozen=True, slots=True)
class OpenRun:
    run_id: int
    dag_id: int
    version_id: int
    dag: str
    schedule_id: int | None
    schedule: str | None
    is_started: bool
    is_paused: bool
    max_active_runs: int | None
    due: float
    finish_within: float | None


@dataclass(frozen=True, slots=True)
class ProgressRow:
    run_id: int
    idx: int
    ended: int
    elapsed: list[float]
    waiting: int
    wakes_in: float | None
    place: int


@dataclass(frozen=True, slots=True)
class VersionTask:
    version_id: int
    idx: int
    name: str
    queue: str
    rank: int
    needs_slot: bool
    durations: list[float]
    skip_share: float
    instances: float
    gates: list[tuple[str, int, int]] | None


@dataclass(frozen=True, slots=True)
class DueSchedule:
    schedule_id: int
    schedule: str
    dag_id: int
    dag: str
    version_id: int
    max_active_runs: int | None
    spec: str
    delay_seconds: float
    finish_within: float | None
    next_due: datetime


@dataclass(frozen=True, slots=True)
class Accuracy:
    judged: int
    inside: int
    error_sum: float


@query
async def open_runs(conn: AsyncConnection, *, limit: int) -> list[OpenRun]: ...


@query
async def progress(conn: AsyncConnection, *, run_ids: list[int]) -> list[ProgressRow]: ...


@query
async def version_tasks(conn: AsyncConnection, *, version_ids: list[int]) -> list[VersionTask]: ...


@query
async def version_edges(conn: AsyncConnection, *, version_ids: list[int]) -> list[tuple[int, int, int]]: ...


@query
async def serving(conn: AsyncConnection) -> list[tuple[list[str], int]]: ...


@query
async def due_schedules(conn: AsyncConnection, *, until: datetime, limit: int) -> list[DueSchedule]: ...


@query
async def accuracy(conn: AsyncConnection) -> Accuracy | None: ...
