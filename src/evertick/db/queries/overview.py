"""The overview for the home page, and the data of the charts.

Read-only, and never more than a bounded number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query

JsonObject = dict[str, object]


# Counts stop here and are shown as "1,000 or more".
CAP = 5000


@dataclass(frozen=True, slots=True)
class ActivitySummary:
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
class LateRun:
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


@query
async def activity(conn: AsyncConnection, *, dag_ids: list[int] | None, cap: int = CAP) -> ActivitySummary: ...


@query
async def running(
    conn: AsyncConnection, *, dag_ids: list[int] | None, limit: int, cap: int = CAP
) -> list[RunningRun]: ...


@query
async def failing(
    conn: AsyncConnection, *, dag_ids: list[int] | None, limit: int, window: int = CAP
) -> list[FailingDag]: ...


@query
async def late(conn: AsyncConnection, *, dag_ids: list[int] | None, limit: int) -> list[LateRun]: ...


@query
async def upcoming(
    conn: AsyncConnection, *, seconds: float, dag_ids: list[int] | None, limit: int, cap: int = CAP
) -> list[Upcoming]: ...


@query
async def lines(conn: AsyncConnection, *, limit: int, cap: int = CAP) -> list[QueueLine]: ...


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
    """`cleared_at`: the last clear before the current start."""

    run_id: int
    state: str
    due_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    cleared_at: datetime | None


@dataclass(frozen=True, slots=True)
class StateOfTask:
    """The number of instances of a task in a state; a task that is not mapped has one."""

    idx: int
    state: str
    instances: int
    is_mapped: bool


@query
async def attempts_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[RunAttempt]: ...


@query
async def open_tasks_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[OpenTask]: ...


@query
async def runs_by_hour(
    conn: AsyncConnection, *, dag_id: int, since: datetime, timezone: str, newest: int
) -> list[RunsOfHour]: ...


@query
async def durations(conn: AsyncConnection, *, dag_id: int, newest: int) -> list[RunLength]: ...


@query
async def task_durations(conn: AsyncConnection, *, dag_id: int, task: str, newest: int) -> list[RunLength]: ...


@query
async def states_of_run(conn: AsyncConnection, *, run_id: int, limit: int) -> list[StateOfTask]: ...
