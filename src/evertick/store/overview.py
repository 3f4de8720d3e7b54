"""The overview for the home page. Read-only, and never more than a bounded number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_row
from evertick.store.statements import sql

JsonObject = dict[str, object]
# Counts stop here and are shown as "1,000 or more".
CAP = 5000


@dataclass(frozen=True, slots=True)
class Pulse:
    """`late`: schedules that are due and have not fired, the first of them since `late_since`. Lags in seconds."""

    read_at: datetime
    running: int
    queued: int
    tasks: int
    ready: int
    late: int
    late_since: datetime | None
    lag_median: float | None
    lag_most: float | None
    broken_files: int
    dags: int


@dataclass(frozen=True, slots=True)
class RunningRun:
    run_id: int
    dag: str
    state: str
    started_at: datetime | None
    open_tasks: int
    task_count: int
    kind: str
    fire_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailingDag:
    """`newest`: the states of its newest runs, the newest first."""

    dag: str
    failures: int
    run_id: int
    finished_at: datetime | None
    reason: str | None
    newest: list[str]

    @property
    def in_a_row(self) -> int:
        """The number of consecutive failures up to the latest finished run."""
        ended = [state for state in self.newest if state not in ("queued", "running")]
        return next((place for place, state in enumerate(ended) if state != "failed"), len(ended))


@dataclass(frozen=True, slots=True)
class LateThing:
    """An open alert, or a quarantined schedule with its `reason`."""

    kind: str
    dag: str
    schedule: str
    task: str | None
    run_id: int | None
    since: datetime | None
    count: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Upcoming:
    dag: str
    schedule: str
    next_due: datetime
    spec: JsonObject
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class QueueLine:
    """A queue with waiting tasks, the first of them since `oldest_at`."""

    queue: str
    depth: int
    oldest_at: datetime | None
    is_served: bool


async def pulse(conn: AsyncConnection, *, dag_ids: list[int] | None) -> Pulse:
    row = await one_row(conn, sql("overview", "pulse"), {"dag_ids": dag_ids, "cap": CAP}, Pulse)
    assert row is not None
    return row


async def running(conn: AsyncConnection, *, dag_ids: list[int] | None, limit: int) -> list[RunningRun]:
    params = {"dag_ids": dag_ids, "limit": limit, "cap": CAP}
    return await all_rows(conn, sql("overview", "running"), params, RunningRun)


async def failing(conn: AsyncConnection, *, dag_ids: list[int] | None, limit: int) -> list[FailingDag]:
    params = {"dag_ids": dag_ids, "limit": limit, "window": CAP}
    return await all_rows(conn, sql("overview", "failing"), params, FailingDag)


async def late(conn: AsyncConnection, *, dag_ids: list[int] | None, limit: int) -> list[LateThing]:
    return await all_rows(conn, sql("overview", "late"), {"dag_ids": dag_ids, "limit": limit}, LateThing)


async def upcoming(conn: AsyncConnection, *, seconds: float, dag_ids: list[int] | None, limit: int) -> list[Upcoming]:
    params = {"seconds": seconds, "dag_ids": dag_ids, "limit": limit, "cap": CAP}
    return await all_rows(conn, sql("overview", "upcoming"), params, Upcoming)


async def lines(conn: AsyncConnection, *, limit: int) -> list[QueueLine]:
    return await all_rows(conn, sql("overview", "lines"), {"cap": CAP, "limit": limit}, QueueLine)
