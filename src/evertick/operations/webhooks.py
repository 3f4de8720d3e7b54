"""Webhooks from outside: how each is signed, and the events that it sends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen

from evertick.db.queries import requests
from evertick.db.queries.requests import WebhookRow
from evertick.domain.dags.waits import check_event_name
from evertick.domain.errors import NotFound, UserError
from evertick.domain.inbound.webhooks import (
    LONGEST_TOLERANCE_SECONDS,
    USUAL_TOLERANCE_SECONDS,
    Digest,
    HmacHeaders,
    Webhook,
    WebhookKind,
    check_webhook,
)
from evertick.domain.stored_values import ValueKind, check_name
from evertick.engine.inbound.events import delete_webhook as delete
from evertick.engine.inbound.events import put_webhook as put
from evertick.operations.caller import Caller
from evertick.operations.paging import USUAL_ITEMS, Cursor, Limit, Page, RequestBody, record_of, short_page

WebhookName = Annotated[str, MinLen(1), MaxLen(200), Doc("The webhook's name, the last part of its path.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDetails:
    """`headers`: of a webhook of the kind hmac."""

    name: str
    kind: WebhookKind
    secret: str
    event: str
    tolerance_seconds: float
    headers: dict[str, str | None] | None
    changed_by: str
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRequest(RequestBody):
    """`secret`: the name of a stored secret with at least 16 characters. `event`: the name of the events; `{type}` in it is the
    type of the message. `tolerance_seconds`: how far the time of a signature may be from now."""

    kind: WebhookKind
    secret: Annotated[str, MaxLen(200)]
    event: Annotated[str, MinLen(1), MaxLen(200)]
    tolerance_seconds: Annotated[float, Ge(1), Le(LONGEST_TOLERANCE_SECONDS)] = USUAL_TOLERANCE_SECONDS
    headers: HmacHeaders | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookChange:
    is_new: bool


async def list_webhooks(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[WebhookDetails]:
    """List webhooks by name."""
    async with caller.read() as conn:
        return short_page(await requests.webhooks(conn), limit, cursor, lambda row: (row.name,), _details)


async def show_webhook(caller: Caller, *, name: WebhookName) -> WebhookDetails:
    """Show one webhook."""
    async with caller.read() as conn:
        row = await requests.find_webhook(conn, name=name)
    if row is None:
        raise _unknown(name)
    return _details(row)


async def put_webhook(caller: Caller, *, name: WebhookName, body: WebhookRequest) -> WebhookChange:
    """Create a webhook, or replace it. From then on `POST /hooks/{name}` accepts what is signed with its secret."""
    check_name(ValueKind.SECRET, name)
    check_name(ValueKind.SECRET, body.secret)
    if problem := check_event_name(body.event):
        raise UserError(f"{body.event[:100]!r} is not a valid name for an event: {problem}.")
    check_webhook(Webhook(name=name, **{each: getattr(body, each) for each in body.__dataclass_fields__}))
    async with caller.write() as conn:
        headers = None if body.headers is None else asdict(body.headers)
        is_new = await put(
            conn,
            name=name,
            webhook={
                "kind": body.kind,
                "secret": body.secret,
                "event": body.event,
                "tolerance_seconds": body.tolerance_seconds,
                "headers": headers,
            },
            actor=caller.actor,
        )
    return WebhookChange(is_new=is_new)


async def delete_webhook(caller: Caller, *, name: WebhookName) -> None:
    """Delete a webhook. Later deliveries to it are refused."""
    async with caller.write() as conn:
        if not await delete(conn, name=name, actor=caller.actor):
            raise _unknown(name)


def read_headers(raw: dict[str, Any] | None) -> HmacHeaders | None:
    return None if raw is None else HmacHeaders(**{**raw, "digest": Digest(raw["digest"])})


def _details(row: WebhookRow) -> WebhookDetails:
    return record_of(WebhookDetails, row, kind=WebhookKind(row.kind))


def _unknown(name: str) -> NotFound:
    return NotFound(f"There is no webhook {name[:200]!r}. List them with `evertick webhooks list`.")
