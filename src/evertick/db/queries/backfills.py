"""Backfills: their rows, the leader's step, and requests to pause, resume and cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.statements import all_rows, one_row, one_value, sql

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class Created:
    id: int
    is_new: bool


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
class Advanced:
    made: int
    ended: int
    moved: bool
    is_over: bool


@dataclass(frozen=True, slots=True)
class Canceled:
    """Both are None if the backfill was already over."""

    runs: int | None
    asked: int | None


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
    run_id: int
    state: str


@dataclass(frozen=True, slots=True)
class FailedRun:
    run_id: int
    fire_at: datetime


async def create(conn: AsyncConnection, *, plan: JsonObject, request: str, actor: str) -> Created | None:
    """The id is None if the DAG no longer exists."""
    values = {"plan": Jsonb(plan), "request": request, "actor": actor}
    made = await one_row(conn, sql("backfills", "create"), values, Created)
    return None if made is None or made.id is None else made


async def position(conn: AsyncConnection, *, backfill_id: int) -> Position | None:
    return await one_row(conn, sql("backfills", "position"), {"backfill_id": backfill_id}, Position)


async def advance_backfill(
    conn: AsyncConnection,
    *,
    leader: tuple[int, int],
    backfill_id: int,
    position: datetime | None,
    instants: Sequence[datetime],
    is_all: bool,
) -> Advanced:
    """`leader`: the shard and the epoch."""
    values = {
        "shard": leader[0],
        "epoch": leader[1],
        "backfill_id": backfill_id,
        "position": position,
        "instants": list(instants),
        "is_all": is_all,
    }
    row = await one_row(conn, sql("backfills", "step"), values, Advanced)
    assert row is not None
    return row


async def fail(conn: AsyncConnection, *, leader: tuple[int, int], backfill_id: int, reason: str) -> bool:
    values = {"shard": leader[0], "epoch": leader[1], "backfill_id": backfill_id, "reason": reason.replace("\x00", "")}
    return bool(await one_value(conn, sql("backfills", "fail"), values))


async def pause(conn: AsyncConnection, *, backfill_id: int, paused: bool, actor: str) -> bool:
    values = {"backfill_id": backfill_id, "paused": paused, "actor": actor}
    return bool(await one_value(conn, sql("backfills", "pause"), values))


async def cancel(conn: AsyncConnection, *, backfill_id: int, leaves_runs: bool, actor: str) -> Canceled:
    values = {"backfill_id": backfill_id, "leaves_runs": leaves_runs, "actor": actor}
    row = await one_row(conn, sql("backfills", "cancel"), values, Canceled)
    assert row is not None
    return row


async def find(conn: AsyncConnection, backfill_id: int) -> BackfillRow | None:
    return await one_row(conn, sql("backfills", "find"), {"backfill_id": backfill_id}, BackfillRow)


async def list_newest(
    conn: AsyncConnection,
    *,
    dag: str | None = None,
    limit: int = 20,
    before: int = 2**31,
    dag_ids: list[int] | None = None,
) -> list[BackfillRow]:
    values = {"dag": dag, "limit": limit, "before": before, "dag_ids": dag_ids}
    return await all_rows(conn, sql("backfills", "list"), values, BackfillRow)


async def existing(
    conn: AsyncConnection, *, dag_id: int, schedule_id: int | None, instants: Sequence[datetime]
) -> list[ExistingRun]:
    values = {"dag_id": dag_id, "schedule_id": schedule_id, "instants": list(instants)}
    return await all_rows(conn, sql("backfills", "existing"), values, ExistingRun)


async def failed_runs(conn: AsyncConnection, *, backfill_id: int, limit: int = 10) -> list[FailedRun]:
    values = {"backfill_id": backfill_id, "limit": limit}
    return await all_rows(conn, sql("backfills", "failed_runs"), values, FailedRun)
