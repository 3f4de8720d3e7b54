"""What surrounds every request, as plain ASGI: an id, a bound on its size, a bound on how often, and the headers of safety.

Streams pass through untouched: nothing here waits for a whole answer.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evertick.api.problems import problem
from evertick.domain.errors import TooLarge, TooMany
from evertick.services import metrics

MOST_BODY_BYTES = 1024 * 1024
_MOST_CLIENTS = 10_000
_CLIENTS_PER_ADDRESS = 5
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")

SAFETY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; form-action 'self'; base-uri 'none'",
}

# As they are sent: an answer has other things to do than to encode them.
_SAFETY = [(name.lower().encode(), value.encode()) for name, value in SAFETY.items()]
_LOOKED_AT = {b"x-request-id", b"authorization", b"content-length"}
_ANSWERED = {family: metrics.API_REQUESTS.labels(status=f"{family}xx") for family in range(1, 6)}


class Bucket:
    """Lets each client ask `rate` times a second, and four seconds' worth at once. The longest unseen are forgotten."""

    def __init__(self, rate: float) -> None:
        self._rate, self._most = rate, max(4 * rate, 1.0)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float) -> float:
        """Seconds to wait; 0 if it may go on."""
        if self._rate <= 0:
            return 0.0
        left, since = self._left.pop(client, (self._most, now))
        left = min(self._most, left + (now - since) * self._rate)
        if left >= 1:
            self._left[client] = (left - 1, now)
        else:
            self._left[client] = (left, now)
        if len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if left >= 1 else (1 - left) / self._rate


class Exempt(Protocol):
    """Those for whom other bounds hold."""

    def most_bytes(self, path: str) -> int | None:
        """How much a body of theirs may have; None for a path that is not theirs."""

    def are_known(self, path: str, authorization: str) -> bool:
        """Whether it is one of them: then their address does not count, behind which there may be thousands."""


class Surroundings:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, *, rate: float, agents: Exempt) -> None:
        self._app, self._agents, self._of_token = app, agents, Bucket(rate)
        # Behind one address there may be several; but made-up tokens must not be a way round.
        self._of_address = Bucket(_CLIENTS_PER_ADDRESS * rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Of two of one name the first counts, as it does for the door.
        headers = {name: value for name, value in reversed(scope["headers"]) if name in _LOOKED_AT}
        asked = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else os.urandom(8).hex()
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.monotonic()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", ()))
                present = {name for name, _ in own}
                own += [header for header in _SAFETY if header[0] not in present]
                message["headers"] = [*own, (b"x-request-id", request_id.encode())]
                _ANSWERED[message["status"] // 100].inc()
                metrics.API_SECONDS.observe(time.monotonic() - began)
            await send(message)

        client = scope["client"][0] if scope.get("client") else "unknown"
        path, authorization = scope["path"], headers.get(b"authorization", b"").decode("latin-1")
        token = authorization[-40:] or client
        wait_seconds = self._of_token.take(token, began)
        if not self._agents.are_known(path, authorization):
            wait_seconds = max(wait_seconds, self._of_address.take(client, began))
        most = self._agents.most_bytes(path) or MOST_BODY_BYTES
        if wait_seconds > 0:
            error = TooMany("Too many requests from here.", retry_after_seconds=wait_seconds)
            await problem(Request(scope), error)(scope, receive, tell)
        elif int(headers.get(b"content-length") or 0) > most:
            await problem(Request(scope), TooLarge(_too_large(most)))(scope, receive, tell)
        else:
            await self._app(scope, _bounded(receive, most), tell)


def _too_large(most: int) -> str:
    return f"The body is larger than {most} bytes."


def _bounded(receive: Receive, most: int) -> Receive:
    """Also for who does not tell beforehand how much comes."""
    total = 0

    async def take() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > most:
            # One of the framework's own: it takes any other for a body that cannot be read.
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(most))
        return message

    return take
