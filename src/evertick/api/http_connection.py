"""A connection of the API: bounded in size and time, and closed for others while it is idle.

The parser buffers headers of any size until they are complete: headers without an end would fill the memory.
Header and body of a response leave in one write: separate writes cost another system call, packet and read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import Enum
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from evertick.api.problems import bare_response
from evertick.api.service import IDLE_SECONDS
from evertick.config import Settings

MOST_HEAD_BYTES = 64 * 1024
_SWEEP_SECONDS = 1.0
# The slowest client whose body is read to its end.
_BODY_BYTES_PER_SECOND = 4096


class WholeAnswer:
    """The transport of one response: holds back a header with a content length until the body begins. Streams have none."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._has_begun = False

    def write(self, data: bytes) -> None:
        is_first, self._has_begun = not self._has_begun, True
        if self._head is not None:
            data, self._head = self._head + data, None
        elif is_first and b"\r\ncontent-length: " in data:
            self._head = data
            return
        self._transport.write(data)

    def close(self) -> None:
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Phase(Enum):
    HEAD = "head"
    BODY = "body"
    RESPONSE = "response"
    IDLE = "idle"


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection that sends headers, trailers or chunk extensions above the size limit, and one that is slow."""

    _bytes_since = 0

    def __init__(self, *args: Any, settings: Settings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings
        self._phase = _Phase.HEAD
        self._since = self.loop.time()
        self._body_bytes = 0
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, BoundedHttp) and each is not self]
        address = self.client[0] if self.client else None
        siblings = [each for each in others if each.client and each.client[0] == address]
        # All connections of the clients of a proxy come from its address.
        is_proxy = address in self._settings.api_trusted_proxies
        if len(siblings) >= self._settings.api_connections_per_address and not is_proxy:
            if not _close_oldest(siblings):
                transport.abort()
        elif len(others) >= (total := self._settings.api_connections) - max(1, total // 16):
            _close_oldest(others)

    @property
    def idle_since(self) -> float | None:
        """Since when the connection has waited for a request or its head."""
        is_open = not self.transport.is_closing()
        return self._since if is_open and self._phase in (_Phase.HEAD, _Phase.IDLE) else None

    def close_if_slow(self, now: float) -> None:
        """Called every second: a timer for each request would cost more."""
        unread = self.transport.get_write_buffer_size() > 0
        self._unread_since = (self._unread_since or now) if unread else None
        if self._unread_since is not None and now - self._unread_since > self._settings.api_slow_seconds:
            self.transport.abort()
            return
        if self.flow.read_paused:  # the API is slow, not the client
            self._since = now
        allowed = {
            _Phase.HEAD: self._settings.api_slow_seconds,
            _Phase.BODY: self._settings.api_slow_seconds + self._body_bytes / _BODY_BYTES_PER_SECOND,
            _Phase.IDLE: IDLE_SECONDS,
        }.get(self._phase)
        if allowed is not None and now - self._since > allowed:
            self.transport.close()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def on_message_begin(self) -> None:
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEAD)
        super().on_message_begin()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _Phase.RESPONSE and self.cycle.response_complete:
            self._enter(_Phase.IDLE)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        self._bytes_since += len(data)
        super().data_received(data)
        if self._bytes_since > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request headers too large: the limit is {MOST_HEAD_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        body, headers = bare_response(HTTPStatus.BAD_REQUEST, "invalid", msg)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n".encode() + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        # With too many connections the server replaces the application.
        refuse: Any = _refuse_overload
        super()._start_asgi_task(cycle, app if app is self.app else refuse)

    def on_headers_complete(self) -> None:
        self._bytes_since = self._body_bytes = 0
        self._enter(_Phase.BODY)
        super().on_headers_complete()
        if self.scope["method"] == "GET":
            self.cycle.transport = WholeAnswer(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._bytes_since = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_since = 0
        self._enter(_Phase.IDLE if self.cycle.response_complete else _Phase.RESPONSE)
        super().on_message_complete()


async def _refuse_overload(scope: Scope, receive: Receive, send: Send) -> None:
    body, headers = bare_response(
        HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", "The server has too many connections. Retry later."
    )
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": HTTPStatus.SERVICE_UNAVAILABLE, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def close_slow_connections(connections: Iterable[object]) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        now = asyncio.get_running_loop().time()
        for each in list(connections):
            if isinstance(each, BoundedHttp):
                each.close_if_slow(now)


def _close_oldest(connections: Iterable[BoundedHttp]) -> bool:
    """Close the connection that has been idle for the longest time. False if none is idle."""
    idle = [(since, each) for each in connections if (since := each.idle_since) is not None]
    if idle:
        min(idle, key=lambda found: found[0])[1].transport.abort()
    return bool(idle)
