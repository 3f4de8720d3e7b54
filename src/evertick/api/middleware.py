"""ASGI middleware around every request: request id, size limit, rate limit and security headers.

Responses are not buffered, so streams pass through unchanged. Agents have limits of their own.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from contextlib import suppress
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evertick.api.agent.auth import PREFIX, token_of
from evertick.api.context import ApiContext
from evertick.api.problems import problem
from evertick.api.runner.sent import MOST_EXCHANGE_BYTES
from evertick.api.runner.sent import PREFIX as RUNNER_PREFIX
from evertick.domain.agent_protocol import TokenUse
from evertick.domain.errors import EvertickError, RateLimited, TooLarge, Unauthenticated
from evertick.observability import metrics

MOST_BODY_BYTES = 1024 * 1024
# A piece of an uploaded archive; and a webhook, which is not kept: GitHub sends up to 25 MB.
MOST_UPLOAD_BYTES, UPLOADS = 8 * 1024 * 1024, "/api/v1/uploads/"
MOST_WEBHOOK_BYTES, DEPLOYMENTS = 25 * 1024 * 1024, "/api/v1/deployments/"


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


# Browsers use the address only with TLS, for a year.
_HSTS = (b"strict-transport-security", b"max-age=31536000")
# Encoded once instead of per response.
_SAFETY = [(name.lower().encode(), value.encode()) for name, value in SAFETY.items()]


_LOOKED_AT = {b"x-request-id", b"authorization", b"content-length"}


_ANSWERED = {family: metrics.API_REQUESTS.labels(status=f"{family}xx") for family in range(1, 6)}


class Bucket:
    """A token bucket per client: `rate` requests a second, bursts of four seconds' worth. The oldest entries are evicted."""

    def __init__(self, rate: float) -> None:
        self._rate, self._most = rate, max(4 * rate, 1.0)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float) -> float:
        """The seconds to wait; 0 if the request is allowed."""
        if self._rate <= 0:
            return 0.0
        left, since = self._left.pop(client, (self._most, now))
        left = min(self._most, left + (now - since) * self._rate)
        self._left[client] = (left - (left >= 1), now)
        if len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if left >= 1 else (1 - left) / self._rate


class Middleware:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, *, rate: float, agents: AgentRequestLimits) -> None:
        self._app, self._agents, self._of_token = app, agents, Bucket(rate)
        # Several clients may share an address, but made-up tokens must not bypass its limit.
        self._of_address = Bucket(_CLIENTS_PER_ADDRESS * rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Of two headers with one name, the first counts, as in authentication.
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
                if scope.get("scheme") == "https":
                    own.append(_HSTS)
                message["headers"] = [*own, (b"x-request-id", request_id.encode())]
                _ANSWERED[message["status"] // 100].inc()
                metrics.API_SECONDS.observe(time.monotonic() - began)
            await send(message)

        client = scope["client"][0] if scope.get("client") else "unknown"
        path, authorization = scope["path"], headers.get(b"authorization", b"").decode("latin-1")
        token = authorization[-40:] or client
        wait_seconds = 0.0
        # A runner sends one exchange for many tasks, but no fixed number of them.
        if not self._agents.is_runner(path, authorization):
            wait_seconds = self._of_token.take(token, began)
            if not self._agents.are_known(path, authorization):
                wait_seconds = max(wait_seconds, self._of_address.take(client, began))
        most = self._agents.most_bytes(path) or _most_bytes(path)
        if wait_seconds > 0:
            error = RateLimited("Too many requests. Retry later.", retry_after_seconds=wait_seconds)
            await problem(Request(scope), error)(scope, receive, tell)
        elif int(headers.get(b"content-length") or 0) > most:
            await problem(Request(scope), TooLarge(_too_large(most)))(scope, receive, tell)
        else:
            await self._app(scope, _bounded(receive, most), tell)


def _most_bytes(path: str) -> int:
    if path.startswith(UPLOADS):
        return MOST_UPLOAD_BYTES
    return MOST_WEBHOOK_BYTES if path.startswith(DEPLOYMENTS) and path.endswith("/push") else MOST_BODY_BYTES


def _too_large(most: int) -> str:
    return f"The request body is too large: the limit is {most} bytes."


def _bounded(receive: Receive, most: int) -> Receive:
    """Limit the size of a body without a Content-Length header."""
    total = 0

    async def take() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > most:
            # An exception class of the framework: it reports any other one as an unreadable body.
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(most))
        return message

    return take


# A finish request: the reason and the last log lines, with JSON escapes.
_ROOM_BYTES = 1024 * 1024


class AgentRequestLimits:
    """Agents have limits of their own."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        settings = context.settings
        # A result inside a JSON string: each quotation mark takes two characters.
        self._most_bytes = max(4 * _ROOM_BYTES, 3 * settings.result_spill_bytes + _ROOM_BYTES)
        self._most_result_bytes = settings.result_max_bytes

    def most_bytes(self, path: str) -> int | None:
        """The size limit of a body on this path; None if the path is not one of agents."""
        if path.startswith(f"{RUNNER_PREFIX}/"):
            is_result = path.startswith(f"{RUNNER_PREFIX}/attempts/")
            return self._most_result_bytes if is_result else MOST_EXCHANGE_BYTES + self._most_bytes
        if not path.startswith(f"{PREFIX}/"):
            return None
        return self._most_result_bytes if path.startswith(f"{PREFIX}/results/") else self._most_bytes

    def is_runner(self, path: str, authorization: str) -> bool:
        """Whether a session of a runner sent it."""
        if not path.startswith(f"{RUNNER_PREFIX}/"):
            return False
        with suppress(EvertickError):
            self._context.runner_tokens.read(token_of(authorization))
            return True
        return False

    def are_known(self, path: str, authorization: str) -> bool:
        """Whether the request is exempt from the rate limit per address, which thousands of agents may share. An invalid token
        must not bypass it."""
        if not path.startswith(f"{PREFIX}/"):
            return False
        for use in TokenUse:
            with suppress(Unauthenticated, EvertickError):
                self._context.agent_tokens.read(token_of(authorization), use)
                return True
        return False
