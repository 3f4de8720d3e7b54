"""Server-sent events: encoding, and a response that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from evertick.domain.errors import TooMany

HEARTBEAT_SECONDS = 15.0
# A client that accepts no data for this long is considered disconnected.
PATIENCE_SECONDS = 60.0


def event(name: str, facts: dict[str, object], *, id: str) -> str:
    """Encode an event. JSON contains no line break, so one data line is enough."""
    return f"id: {id}\nevent: {name}\ndata: {json.dumps(facts, separators=(',', ':'))}\n\n"


def heartbeat(*, id: str) -> str:
    """Encode a comment that only updates the client's last event id. Browsers dispatch no event for it."""
    return f": still here\nid: {id}\n\n"


class Seats:
    """The limit of open streams of one kind, per process and per user."""

    def __init__(self, *, most: int, most_of_user: int) -> None:
        self._most, self._most_of_user, self._taken = most, most_of_user, Counter[str]()

    def take(self, user: str) -> None:
        if self._taken.total() >= self._most or self._taken[user] >= self._most_of_user:
            raise TooMany(
                f"Too many open streams: {self._taken[user]} of {user}, {self._taken.total()} in total."
                " Close some or retry later.",
                retry_after_seconds=HEARTBEAT_SECONDS,
            )
        self._taken[user] += 1

    def leave(self, user: str) -> None:
        self._taken[user] -= 1
        if not self._taken[user]:
            del self._taken[user]


class EventStream(StreamingResponse):
    """`on_close` is called exactly once. Never compressed: gzip would buffer events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], *, on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Content-Encoding": "identity", "X-Accel-Buffering": "no"})
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        async def patiently(message: object) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await send(message)  # type: ignore[arg-type]

        with suppress(TimeoutError):
            await super().stream_response(patiently)


class TextStream(EventStream):
    """Plain text lines, sent as they become available."""

    media_type = "text/plain; charset=utf-8"
