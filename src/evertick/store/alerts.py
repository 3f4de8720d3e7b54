"""Alerts: schedules that did not fire, and runs or tasks that did not start or finish, in time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class AlertChange:
    """An alert that was raised or resolved. A run without a schedule has only a notification."""

    kind: str
    dag: str
    schedule: str | None
    run_id: int | None
    task: str | None
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Alert:
    alert_id: int
    kind: str
    dag: str
    schedule: str
    task: str | None
    run_id: int | None
    due_at: datetime
    last_due_at: datetime
    count: int
    raised_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`ended`: include resolved alerts. `is_over` and `before` come from the last alert of the previous page."""

    dag: str | None = None
    ended: bool = False
    dag_ids: list[int] | None = None
    is_over: bool = False
    before: int = 2**63 - 1


async def raise_due(
    conn: AsyncConnection, *, shard: int, epoch: int, unfired_seconds: float, batch: int
) -> list[AlertChange]:
    params = {"shard": shard, "epoch": epoch, "unfired_seconds": unfired_seconds, "batch": batch}
    return await all_rows(conn, sql("alerts", "raise"), params, AlertChange)


async def list_all(conn: AsyncConnection, wanted: Wanted, *, limit: int = 100) -> list[Alert]:
    """Open alerts first, the latest first."""
    return await all_rows(conn, sql("alerts", "list"), {**asdict(wanted), "limit": limit}, Alert)
