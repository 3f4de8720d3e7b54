"""What was told to whom, what waits, and what could not be sent. Who may see it sees that of all DAGs: sinks are shared."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.notify import Channel
from evertick.db.queries import notifications
from evertick.db.queries.notifications import Delivery
from evertick.domain.access import Permission
from evertick.engine.notifications import find_delivery, retry_failed, retry_one

router = APIRouter(route_class=GuardedRoute, tags=["notifications"])

Number = Annotated[int, Path(ge=1, le=LARGEST, description="The notification's number.")]
Text = Annotated[str | None, Query(max_length=1000)]


class DeliveryState(StrEnum):
    WAITING = "waiting"
    SENT = "sent"
    FAILED = "failed"


class Notification(BaseModel):
    """`fact`: what is told. `due_at`: when it is tried next, while it waits. `answer`: what the sink said last."""

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


class Again(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sink: str | None = None


class TriedAgain(BaseModel):
    count: int


@router.get("/notifications")
@requires(Permission.READ_NOTIFICATIONS)
async def list_notifications(
    caller: Who,
    state: DeliveryState | None = None,
    dag: Text = None,
    sink: Text = None,
    run_id: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
    limit: Limit = USUAL_ITEMS,
    after: Cursor = None,
) -> Page[Notification]:
    """The newest first."""
    (before,) = read_cursor(after, LARGEST)
    wanted = notifications.DeliveryFilter(state=state, dag=dag, sink=sink, run_id=run_id, before=before)
    async with caller.reading() as conn:
        if dag is not None:
            await caller.dag(conn, dag)
        found = await notifications.list_deliveries(conn, wanted, limit=limit)
    last = cursor(found[-1].delivery_id) if len(found) == limit else None
    return Page(items=[_notification(each) for each in found], next_cursor=last)


@router.get("/notifications/{number}")
@requires(Permission.READ_NOTIFICATIONS)
async def show_notification(number: Number, caller: Who) -> Notification:
    """One of them, with all that is told."""
    async with caller.reading() as conn:
        return _notification(await find_delivery(conn, number))


@router.post("/notifications/retry")
@requires(Permission.RESEND_NOTIFICATIONS)
async def retry_all(caller: Who, wanted: Again | None = None) -> TriedAgain:
    """Try all again that failed, or those of one sink: from the start, and under their old numbers."""
    async with caller.changing(Channel.PLAN) as conn:
        return TriedAgain(count=await retry_failed(conn, sink=wanted.sink if wanted else None, actor=caller.actor))


@router.post("/notifications/{number}/retry")
@requires(Permission.RESEND_NOTIFICATIONS)
async def retry(number: Number, caller: Who) -> Notification:
    """Try one again that failed. One that was sent, or is being tried, is answered with 409."""
    async with caller.changing(Channel.PLAN) as conn:
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
