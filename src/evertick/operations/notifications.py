"""Alerts, quarantine and notifications: list, show and retry.

A caller who may see notifications sees those of all DAGs: destinations are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, cast

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen

from evertick.db.notify import Channel
from evertick.db.queries import notifications
from evertick.db.queries.notifications import Alert, Delivery, QuarantinedItem
from evertick.engine.notifications import find_delivery, retry_failed, retry_one
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    LARGEST,
    USUAL_ITEMS,
    Cursor,
    Limit,
    Page,
    RequestBody,
    page_of,
    read_cursor,
    record_of,
)

DagFilter = Annotated[str | None, MaxLen(1000), Doc("Only of this DAG.")]
NotificationId = Annotated[int, Ge(1), Le(LARGEST), Doc("The notification's number.")]


class DeliveryState(StrEnum):
    WAITING = "waiting"
    SENT = "sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """`payload` is the content, `due_at` the next attempt while it waits, `last_response` the last response of the destination."""

    notification_id: int
    state: DeliveryState
    sink: str
    event: str
    run_id: int | None
    payload: dict[str, Any]
    created_at: datetime
    attempts: int
    due_at: datetime
    ended_at: datetime | None
    last_response: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequest(RequestBody):
    sink: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryResult:
    count: int


async def list_alerts(
    caller: Caller,
    *,
    dag: DagFilter = None,
    with_ended: Annotated[bool, Doc("Also alerts that are over.")] = False,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Alert]:
    """List schedules that did not fire and runs that did not start or finish in time. Open alerts first, then the
    latest."""
    is_over, before = read_cursor(cursor, 0, LARGEST)
    async with caller.read() as conn:
        if dag is not None:
            await caller.dag(conn, dag)
        wanted = notifications.AlertFilter(
            dag=dag, ended=with_ended, dag_ids=await caller.visible_dag_ids(conn), is_over=bool(is_over), before=before
        )
        found = await notifications.list_alerts(conn, wanted, limit=limit)
    return page_of(found, limit, lambda row: (int(row.ended_at is not None), row.alert_id), lambda row: row)


async def list_quarantine(
    caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[QuarantinedItem]:
    """List the runs, schedules and DAGs in quarantine because they fail every time, with the reason and the time of the
    next attempt. Oldest first."""
    since, kind, subject = cast("tuple[str, str, int]", read_cursor(cursor, "-infinity", "", 0))
    async with caller.read() as conn:
        found = await notifications.list_quarantined(
            conn, after_since=since, after_kind=kind, after_id=subject, limit=limit
        )
    return page_of(found, limit, lambda row: (row.since.isoformat(), row.kind, row.subject_id), lambda row: row)


async def list_notifications(
    caller: Caller,
    *,
    state: DeliveryState | None = None,
    dag: DagFilter = None,
    sink: Annotated[str | None, MaxLen(1000), Doc("Only to this destination.")] = None,
    run_id: Annotated[int | None, Ge(1), Le(LARGEST), Doc("Only about this run.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Notification]:
    """List notifications, newest first."""
    (before,) = read_cursor(cursor, LARGEST)
    wanted = notifications.DeliveryFilter(state=state, dag=dag, sink=sink, run_id=run_id, before=before)
    async with caller.read() as conn:
        if dag is not None:
            await caller.dag(conn, dag)
        found = await notifications.list_deliveries(conn, wanted, limit=limit)
    return page_of(found, limit, lambda row: (row.delivery_id,), _notification)


async def show_notification(caller: Caller, *, notification_id: NotificationId) -> Notification:
    """Show one notification with its content."""
    async with caller.read() as conn:
        return _notification(await find_delivery(conn, notification_id))


async def retry_notifications(caller: Caller, *, body: RetryRequest | None = None) -> RetryResult:
    """Retry all failed notifications, or those to one destination. They start again and keep their numbers."""
    async with caller.write(Channel.SCHEDULE) as conn:
        return RetryResult(count=await retry_failed(conn, sink=body.sink if body else None, actor=caller.actor))


async def retry_notification(caller: Caller, *, notification_id: NotificationId) -> Notification:
    """Retry one failed notification. If it was sent already or is being tried now, the answer is 409."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await retry_one(conn, delivery_id=notification_id, actor=caller.actor)
        return _notification(await find_delivery(conn, notification_id))


def _notification(row: Delivery) -> Notification:
    return record_of(
        Notification,
        row,
        notification_id=row.delivery_id,
        state=DeliveryState(row.state),
        payload=dict(row.fact),
        last_response=row.answer,
    )
