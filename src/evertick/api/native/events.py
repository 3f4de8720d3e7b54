"""Events from outside, that tasks wait for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import USUAL_ITEMS, IdempotencyKey, Limit, Page
from evertick.db.notify import Channel
from evertick.db.queries import waits
from evertick.db.queries.waits import EventRow, Sent
from evertick.domain.access import Permission
from evertick.domain.dags.waits import check_event_name
from evertick.domain.errors import UserError
from evertick.engine.waits import send_event

router = APIRouter(route_class=GuardedRoute, tags=["events"])

Name = Annotated[str, Path(max_length=1000, description="The event's name, as tasks wait for it.")]


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid")
    payload: Any = None


@router.post("/events/{name}", status_code=201)
@requires(Permission.SEND_EVENTS)
async def send(
    name: Name, response: Response, caller: Who, wanted: Event | None = None, idempotency_key: IdempotencyKey = None
) -> Sent:
    """Send it. The same Idempotency-Key again is the same event, told with 200 instead of 201."""
    payload = wanted.payload if wanted else None
    async with caller.changing(Channel.PLAN) as conn:
        sent = await send_event(conn, name=name, payload=payload, actor=caller.actor, key=idempotency_key)
    response.status_code = 201 if sent.is_new else 200
    return sent


@router.get("/sent-events")
@requires(Permission.READ_EVENTS)
async def list_all_sent(caller: Who, limit: Limit = USUAL_ITEMS) -> Page[EventRow]:
    """What was sent under any name, the newest first."""
    async with caller.reading() as conn:
        return Page(items=await waits.list_events(conn, limit=limit), next_cursor=None)


@router.get("/events/{name}")
@requires(Permission.READ_EVENTS)
async def list_sent(name: Name, caller: Who, limit: Limit = USUAL_ITEMS) -> Page[EventRow]:
    """What was sent under that name, the newest first."""
    if problem := check_event_name(name):
        raise UserError(f"{name[:100]!r} cannot name an event: {problem}.")
    async with caller.reading() as conn:
        return Page(items=await waits.list_events(conn, name=name, limit=limit), next_cursor=None)
