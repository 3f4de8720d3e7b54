"""The outbox of notifications and their deliveries, alerts about late runs, and quarantined rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query
from evertick.domain.notifications import Fact


@dataclass(frozen=True, slots=True)
class ClaimedDelivery:
    """A notification to send now. `attempts` includes this attempt and guards its record."""

    delivery_id: int
    sink: str
    event: str
    fact: Fact
    attempts: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Delivery:
    delivery_id: int
    sink: str
    event: str
    run_id: int | None
    fact: Fact
    created_at: datetime
    state: str
    attempts: int
    due_at: datetime
    ended_at: datetime | None
    answer: str | None


@query
async def record(
    conn: AsyncConnection, taken: ClaimedDelivery, *, state: str, answer: str, rest_seconds: float
) -> int | None:
    """The notification, if this attempt still owned it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFilter:
    """A filter; None for all. `before`: only ids below this one."""

    state: str | None = None
    sink: str | None = None
    dag: str | None = None
    run_id: int | None = None
    before: int | None = None


EVERYTHING = DeliveryFilter()


@query
async def list_deliveries(
    conn: AsyncConnection, wanted: DeliveryFilter = EVERYTHING, *, limit: int = 100
) -> list[Delivery]:
    """The latest first."""


@query
async def find_delivery(conn: AsyncConnection, delivery_id: int) -> Delivery | None: ...


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
class AlertFilter:
    """`ended`: include resolved alerts. `is_over` and `before` come from the last alert of the previous page."""

    dag: str | None = None
    ended: bool = False
    dag_ids: list[int] | None = None
    is_over: bool = False
    before: int = 2**63 - 1


@query
async def list_alerts(conn: AsyncConnection, wanted: AlertFilter, *, limit: int = 100) -> list[Alert]:
    """Open alerts first, the latest first."""


@dataclass(frozen=True, slots=True)
class QuarantinedItem:
    """`subject_id` is that of a schedule, a run or a DAG. `retry_at` is None if only a new version helps."""

    kind: str
    subject_id: int
    verb: str
    reason: str
    failures: int
    since: datetime
    failed_at: datetime
    retry_at: datetime | None
    dag: str | None
    schedule: str | None


@query
async def list_quarantined(
    conn: AsyncConnection,
    *,
    kind: str | None = None,
    subject_id: int | None = None,
    after_since: str = "-infinity",
    after_kind: str = "",
    after_id: int = 0,
    limit: int = 1000,
) -> list[QuarantinedItem]:
    """All, or the one of that kind and id; after the last row of the previous page."""
