"""Backfills: their rows, the leader's step, and requests to pause, resume and cancel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class Position:
    """`spec` as it is stored: one that cannot be decoded must end only its own backfill."""

    spec: str
    first_at: datetime
    last_at: datetime
    position: datetime | None
    newest_first: bool
    is_planning: bool


@dataclass(frozen=True, slots=True)
class BackfillRow:
    backfill_id: int
    dag: str
    schedule: str | None
    spec: JsonObject
    params: JsonObject
    first_at: datetime
    last_at: datetime
    reprocess: str
    newest_first: bool
    parallel: int
    state: str
    reason: str | None
    position: datetime | None
    total: int
    left_alone: int
    made: int
    open_runs: int
    succeeded: int
    failed: int
    canceled: int
    created_by: str
    created_at: datetime
    finished_at: datetime | None
    is_dag_paused: bool

    @property
    def done(self) -> int:
        """The number of instants that are complete."""
        return self.left_alone + self.succeeded + self.failed + self.canceled

    def remaining_seconds(self, now: datetime) -> float | None:
        """The estimated time left at the current rate. Unknown until the first of its runs has ended."""
        ended = self.succeeded + self.failed + self.canceled
        if self.state != "running" or ended == 0 or self.made == 0:
            return None
        # Assume that the remaining range skips instants as often as the completed part.
        behind = self.made + self.left_alone
        runs_left = (self.total - behind) * self.made / behind + self.open_runs
        return max((now - self.created_at).total_seconds(), 0.0) / ended * runs_left


@dataclass(frozen=True, slots=True)
class ExistingRun:
    instant: datetime
    state: str


@dataclass(frozen=True, slots=True)
class FailedRun:
    run_id: int
    fire_at: datetime


@query
async def position(conn: AsyncConnection, *, backfill_id: int) -> Position | None: ...


@query
async def find(conn: AsyncConnection, backfill_id: int) -> BackfillRow | None: ...


@query
async def list_newest(
    conn: AsyncConnection,
    *,
    dag: str | None = None,
    limit: int = 20,
    before: int = 2**31,
    dag_ids: list[int] | None = None,
) -> list[BackfillRow]: ...


@query
async def existing(
    conn: AsyncConnection, *, dag_id: int, schedule_id: int | None, instants: list[datetime], keys: list[str] | None
) -> list[ExistingRun]:
    """The newest runs of these instants, or of their partitions."""


@query
async def failed_runs(conn: AsyncConnection, *, backfill_id: int, limit: int = 10) -> list[FailedRun]: ...
