"""The data of charts: attempts of a run, end states and durations of the newest runs. Read-only and always bounded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class RunAttempt:
    idx: int
    map_index: int
    task: str
    epoch: int
    attempt: int
    outcome: str
    reason: str | None
    let_in_at: datetime | None
    taken_at: datetime | None
    started_at: datetime | None
    start_seconds: float | None
    finished_at: datetime | None
    retry_at: datetime | None
    polled_since: datetime | None


@dataclass(frozen=True, slots=True)
class OpenTask:
    """When its gates admitted it, and when a runner claimed it for a remote executor."""

    idx: int
    map_index: int
    let_in_at: datetime | None
    taken_at: datetime | None


@dataclass(frozen=True, slots=True)
class RunsOfHour:
    hour: datetime
    state: str
    runs: int


@dataclass(frozen=True, slots=True)
class RunLength:
    run_id: int
    state: str
    due_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class StateOfTask:
    """The number of instances of a task in a state; a task that is not mapped has one."""

    idx: int
    state: str
    instances: int
    is_mapped: bool


async def attempts_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[RunAttempt]:
    return await all_rows(conn, sql("charts", "attempts_of_run"), {"run_id": run_id, "limit": limit}, RunAttempt)


async def open_tasks_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[OpenTask]:
    return await all_rows(conn, sql("charts", "open_tasks_of_run"), {"run_id": run_id, "limit": limit}, OpenTask)


async def runs_by_hour(
    conn: AsyncConnection, *, dag_id: int, since: datetime, timezone: str, newest: int
) -> list[RunsOfHour]:
    params = {"dag_id": dag_id, "since": since, "timezone": timezone, "newest": newest}
    return await all_rows(conn, sql("charts", "runs_by_hour"), params, RunsOfHour)


async def durations(conn: AsyncConnection, *, dag_id: int, newest: int) -> list[RunLength]:
    return await all_rows(conn, sql("charts", "durations"), {"dag_id": dag_id, "newest": newest}, RunLength)


async def states_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[StateOfTask]:
    return await all_rows(conn, sql("charts", "states_of_run"), {"run_id": run_id, "limit": limit}, StateOfTask)
