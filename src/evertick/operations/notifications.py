"""Alerts, quarantine and notifications: list, show and retry.

A caller who may see notifications sees those of all DAGs: destinations are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, cast

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen

from evertick.db.notify import Channel
from evertick.db.queries import notifications
from evertick.db.queries.notifications import Alert, Delivery, QuarantinedRow
from evertick.engine.notifications import find_delivery, retry_failed, retry_one
from evertick.operations.caller import Caller
from evertick.operations.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, encode_cursor, read_cursor

DagFilter = Annotated[str | None, MaxLen(1000), Doc("Only of this DAG.")]
Number = Annotated[int, Ge(1), Le(LARGEST), Doc("The notification's number.")]


class DeliveryState(StrEnum):
    WAITING = "waiting"
    SENT = "sent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """`fact` is the content, `due_at` the next attempt while it waits, `answer` the last answer of the destination."""

    number: int
    state: DeliveryState
    sink: str
    event: str
    run_id: int | None
    fact: dict[str, Any]
    created_at: datetime
    attempts: int
    due_at: datetime
    ended_at: datetime | None
    answer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    sink: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedAgain:
    count: int


async def list_alerts(
    caller: Caller,
    *,
    dag: DagFilter = None,
    all: Annotated[bool, Doc("Also alerts that are over.")] = False,
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
            dag=dag, ended=all, dag_ids=await caller.visible_dag_ids(conn), is_over=bool(is_over), before=before
        )
        found = await notifications.list_alerts(conn, wanted, limit=limit)
    last = encode_cursor(int(found[-1].ended_at is not None), found[-1].alert_id) if len(found) == limit else None
    return Page(items=found, next_cursor=last)


async def list_quarantine(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[QuarantinedRow]:
    """List the runs, schedules and DAGs in quarantine because they fail every time, with the reason and the time of the
    next attempt. Oldest first."""
    after = cast("tuple[str, str, int]", read_cursor(cursor, *notifications.FIRST))
    async with caller.read() as conn:
        found = await notifications.list_quarantined(conn, after=after, limit=limit)
    last = found[-1] if len(found) == limit else None
    next_cursor = encode_cursor(last.since.isoformat(), last.kind, last.subject_id) if last is not None else None
    return Page(items=found, next_cursor=next_cursor)


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
    last = encode_cursor(found[-1].delivery_id) if len(found) == limit else None
    return Page(items=[_notification(each) for each in found], next_cursor=last)


async def show_notification(caller: Caller, *, number: Number) -> Notification:
    """Show one notification with its content."""
    async with caller.read() as conn:
        return _notification(await find_delivery(conn, number))


async def retry_all(caller: Caller, *, body: Again | None = None) -> TriedAgain:
    """Retry all failed notifications, or those to one destination. They start again and keep their numbers."""
    async with caller.write(Channel.SCHEDULE) as conn:
        return TriedAgain(count=await retry_failed(conn, sink=body.sink if body else None, actor=caller.actor))


async def retry(caller: Caller, *, number: Number) -> Notification:
    """Retry one failed notification. If it was sent already or is being tried now, the answer is 409."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await retry_one(conn, delivery_id=number, actor=caller.actor)
        return _notification(await find_delivery(conn, number))


def _notification(row: Delivery) -> Notification:
    return Notification(
        number=row.delivery_id,
        state=DeliveryState(row.state),
        sink=row.sink,
        event=row.event,
        run_id=row.run_id,
        fact=dict(row.fact),
        created_at=row.created_at,
        attempts=row.attempts,
        due_at=row.due_at,
        ended_at=row.ended_at,
        answer=row.answer,
    )
