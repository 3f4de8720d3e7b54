"""Tasks: the runner's hot statement, the promoter's statements, and reads and requests of users."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from psycopg import AsyncConnection

from evertick.db.statements import query
from evertick.domain.attempt import TaskKey

JsonObject = dict[str, object]


class ExchangeRow(NamedTuple):
    """A claim, a rejected report, or a notice that more is ready. A tuple, because thousands pass per second."""

    kind: str
    run_id: int
    idx: int
    map_index: int
    epoch: int
    attempt: int
    version_id: int
    fire_at: datetime | None
    params: str
    inputs: str | None
    place: int
    seq: int


class ClaimPosition(NamedTuple):
    """Where a claim starts reading the queue: `low` gives the start for each rank of each queue (`claim`), None is the head; with
    an `aging` in seconds overdue tasks are claimed first (`overdue`), without it the most urgent."""

    low: list[int] | None = None
    aging: float | None = None


FROM_THE_HEAD = ClaimPosition()


@dataclass(frozen=True, slots=True)
class TaskRow:
    task_index: int
    map_index: int
    task: str
    state: str
    attempt: int
    max_attempts: int
    epoch: int
    queue: str
    priority: int
    not_before: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    exit_code: int | None
    reason: str | None
    request: str | None
    map_name: str | None = None

    @property
    def idx(self) -> int:
        """The task's index, as the columns and keys call it."""
        return self.task_index


@dataclass(frozen=True, slots=True)
class AttemptRow:
    epoch: int
    attempt: int
    outcome: str
    reason: str | None
    exit_code: int | None
    started_at: datetime | None
    finished_at: datetime | None
    runner_id: str | None
    host: str | None
    executor: str | None
    cpu_seconds: float | None
    peak_memory_bytes: int | None


@query
async def list_of_run(conn: AsyncConnection, *, run_id: int, limit: int = 1000) -> list[TaskRow]: ...


@query
async def find(conn: AsyncConnection, key: TaskKey) -> TaskRow | None: ...


@query
async def count_by_state(conn: AsyncConnection, *, run_id: int) -> dict[str, int]: ...


@query
async def attempts(conn: AsyncConnection, key: TaskKey) -> list[AttemptRow]: ...


@dataclass(frozen=True, slots=True)
class SensorPolls:
    """Since when a sensor polls, and how often it has."""

    since: datetime
    polls: int


@dataclass(frozen=True, slots=True)
class TriggerFacts:
    """What a deferred task waits for, and which runner runs it (None: none yet)."""

    run_id: int
    idx: int
    map_index: int
    trigger_id: int
    classpath: str
    since: datetime
    queue: str
    runner_id: str | None
    started_at: datetime | None
    host: str | None
    heartbeat_at: datetime | None


@query
async def triggers(
    conn: AsyncConnection, *, run_ids: list[int], idxs: list[int], map_indexes: list[int]
) -> list[TriggerFacts]: ...


@query
async def sensor_polls(conn: AsyncConnection, key: TaskKey) -> SensorPolls | None: ...


@query
async def result(conn: AsyncConnection, key: TaskKey) -> object: ...


@query
async def has_result(conn: AsyncConnection, key: TaskKey) -> bool: ...


@query
async def downstream(conn: AsyncConnection, *, version_id: int, idxs: list[int]) -> list[int]: ...


@query
async def page_of_run(
    conn: AsyncConnection, *, run_id: int, idx: int, map_index: int, state: str | None, limit: int
) -> list[TaskRow]:
    """Rows after this index and map index."""


@query
async def folded_page_of_run(conn: AsyncConnection, *, run_id: int, idx: int, limit: int) -> list[TaskRow]:
    """Rows after this index, a mapped task once."""


@dataclass(frozen=True, slots=True)
class InstanceCount:
    """The instances of a mapped task in one state."""

    idx: int
    state: str
    instances: int
    started_at: datetime | None
    finished_at: datetime | None


@query
async def instances_of_run(conn: AsyncConnection, *, run_id: int) -> list[InstanceCount]: ...


@query
async def by_name(conn: AsyncConnection, *, run_id: int, task: str, limit: int = 1000) -> list[TaskRow]: ...
