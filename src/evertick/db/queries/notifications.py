"""The outbox of notifications and their deliveries, alerts about late runs, and quarantined rows."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, one_row, one_value, sql
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


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """How many notifications expired, and how many have been waiting for how long."""

    given_up: int
    waiting: int
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryResult:
    """The default recipients for all DAGs, the expiry time (and how many expire per call), and the limit of counting."""

    defaults: list[dict[str, object]]
    give_up_seconds: float
    batch: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A sender's capacity: per sink, in total, and the time by which it finishes."""

    passed_over: Collection[str]
    each: int
    batch: int
    seconds: float


async def maintain_outbox(conn: AsyncConnection, *, shard: int, epoch: int, wish: DeliveryResult) -> OutboxStatus:
    params = {
        "shard": shard,
        "epoch": epoch,
        "defaults": json.dumps(wish.defaults),
        "give_up_seconds": wish.give_up_seconds,
        "batch": wish.batch,
        "most": wish.most,
    }
    row = await one_row(conn, sql("notifications", "tend"), params, OutboxStatus)
    assert row is not None
    return row


async def claim_deliveries(conn: AsyncConnection, *, shard: int, epoch: int, room: Room) -> list[ClaimedDelivery]:
    params = {
        "shard": shard,
        "epoch": epoch,
        "passed_over": list(room.passed_over),
        "each": room.each,
        "batch": room.batch,
        "seconds": room.seconds,
    }
    return await all_rows(conn, sql("notifications", "take"), params, ClaimedDelivery)


async def record(
    conn: AsyncConnection, taken: ClaimedDelivery, *, state: str, answer: str, rest_seconds: float
) -> bool:
    """Whether this attempt still owned the notification."""
    params = {
        "delivery_id": taken.delivery_id,
        "attempts": taken.attempts,
        "state": state,
        "answer": answer,
        "rest_seconds": rest_seconds,
    }
    return await one_value(conn, sql("notifications", "record"), params) is not None


async def retry(conn: AsyncConnection, *, ids: list[int] | None, sink: str | None, batch: int, actor: str) -> int:
    params = {"ids": ids, "sink": sink, "batch": batch, "actor": actor}
    return cast(int, await one_value(conn, sql("notifications", "retry"), params))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFilter:
    """A filter; None for all. `before`: only ids below this one."""

    state: str | None = None
    sink: str | None = None
    dag: str | None = None
    run_id: int | None = None
    before: int | None = None


EVERYTHING = DeliveryFilter()


async def list_deliveries(
    conn: AsyncConnection, wanted: DeliveryFilter = EVERYTHING, *, limit: int = 100
) -> list[Delivery]:
    """The latest first."""
    return await all_rows(conn, sql("notifications", "list_deliveries"), {**asdict(wanted), "limit": limit}, Delivery)


async def find_delivery(conn: AsyncConnection, delivery_id: int) -> Delivery | None:
    return await one_row(conn, sql("notifications", "find"), {"delivery_id": delivery_id}, Delivery)


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
class AlertFilter:
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
    return await all_rows(conn, sql("notifications", "raise"), params, AlertChange)


async def list_alerts(conn: AsyncConnection, wanted: AlertFilter, *, limit: int = 100) -> list[Alert]:
    """Open alerts first, the latest first."""
    return await all_rows(conn, sql("notifications", "list_alerts"), {**asdict(wanted), "limit": limit}, Alert)


# Before every row.
FIRST = ("-infinity", "", 0)


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
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


async def list_quarantined(
    conn: AsyncConnection, *, after: tuple[str, str, int] = FIRST, limit: int = 1000
) -> list[QuarantinedRow]:
    """`after`: the time, the kind and the id of the last row of the previous page."""
    return await all_rows(
        conn, sql("notifications", "list_quarantined"), _params(None, None, after, limit), QuarantinedRow
    )


async def find_quarantined(conn: AsyncConnection, *, kind: str, subject_id: int) -> QuarantinedRow | None:
    found = await all_rows(
        conn, sql("notifications", "list_quarantined"), _params(kind, subject_id, FIRST, 1), QuarantinedRow
    )
    return found[0] if found else None


def _params(kind: str | None, subject_id: int | None, after: tuple[str, str, int], limit: int) -> dict[str, object]:
    last = {"after_since": after[0], "after_kind": after[1], "after_id": after[2]}
    return {"kind": kind, "subject_id": subject_id, "limit": limit, **last}
