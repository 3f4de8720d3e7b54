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
