"""Webhooks from outside: a signed request becomes an event, which is stored before the answer.

The signature is checked over the bytes that arrived. An unknown webhook, one without a secret and a wrong signature have the
same answer.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import MaxLen
from fastapi import Path, Request, Response

from evertick.api.auth import GuardedRouter, NativeRoute
from evertick.api.context import Who
from evertick.api.openapi import errors_of
from evertick.api.push_webhook import stored_secret
from evertick.db.notify import Channel
from evertick.db.queries import requests
from evertick.db.queries.shards import read_clock
from evertick.domain.access import Actor, Permission
from evertick.domain.errors import TooLarge
from evertick.domain.inbound.webhooks import MOST_WEBHOOK_BYTES, Webhook, WebhookKind, read_delivery
from evertick.engine.waits import send_event
from evertick.operations.webhooks import read_headers

_PATH = "/hooks/{name}"
# A webhook that accepts nothing, for a name that does not exist: the answer takes as long.
_NOBODY = Webhook(name="", kind=WebhookKind.GITHUB, secret="", event="none")

router = GuardedRouter(NativeRoute)


@router.post(
    _PATH,
    Permission.OPEN,
    tags=["webhooks"],
    operation_id="receive_webhook",
    summary="Receive a signed webhook",
    status_code=202,
    response_class=Response,
    responses=errors_of(lambda: None, method="POST", path=_PATH),
)
async def receive_webhook(name: Annotated[str, MaxLen(200), Path()], request: Request, caller: Who) -> Response:
    """Receive a signed webhook of GitHub, GitLab, Stripe, Slack or any sender that signs with HMAC. It is stored as an event before
    the answer, once for each delivery: one that is sent again changes nothing."""
    body = await _body(request)
    async with caller.read() as conn:
        row = await requests.find_webhook(conn, name=name)
        now = await read_clock(conn)
    hook = _NOBODY
    if row is not None:
        headers = read_headers(row.headers)
        hook = Webhook(
            name=row.name,
            kind=WebhookKind(row.kind),
            secret=row.secret,
            event=row.event,
            tolerance_seconds=row.tolerance_seconds,
            headers=headers,
        )
    secret = None if row is None else await stored_secret(caller, row.secret, webhook=name)
    # Without a secret nothing can be right, and the signature of a sender is never empty.
    given = {key: value for key, value in request.headers.items() if secret is not None}
    found = read_delivery(hook, secret or b"-", given, body, now)
    if found.challenge is not None:
        return Response(found.challenge, status_code=200, media_type="text/plain")
    async with caller.write(Channel.SCHEDULE) as conn:
        actor = Actor(f"webhook:{name}", caller.origin, caller.request_id)
        await send_event(
            conn, name=found.event, payload=found.payload, key=found.key, actor=actor, most_bytes=MOST_WEBHOOK_BYTES
        )
    return Response(status_code=202)


async def _body(request: Request) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_WEBHOOK_BYTES:
            raise TooLarge(f"The webhook takes more than {MOST_WEBHOOK_BYTES:,} bytes.")
    return bytes(content)
