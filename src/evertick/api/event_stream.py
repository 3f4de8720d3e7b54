"""Server-sent events: how they are written, and an answer that ends with its reader."""

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
# Whoever takes nothing for so long is gone, whatever the network believes.
PATIENCE_SECONDS = 60.0


def event(name: str, facts: dict[str, object], *, id: str) -> str:
    """JSON has no line break in it, so one line of data is enough."""
    return f"id: {id}\nevent: {name}\ndata: {json.dumps(facts, separators=(',', ':'))}\n\n"


def heartbeat(*, id: str) -> str:
    """Moves the reader's last id on, and nothing else: browsers see no event in it."""
    return f": still here\nid: {id}\n\n"


class Seats:
    """How many streams of one kind may be open at once, in this process and of one user."""

    def __init__(self, *, most: int, most_of_user: int) -> None:
        self._most, self._most_of_user, self._taken = most, most_of_user, Counter[str]()

    def take(self, user: str) -> None:
        if self._taken.total() >= self._most or self._taken[user] >= self._most_of_user:
            raise TooMany(
                f"Too many streams are open: {self._taken[user]} of {user}, {self._taken.total()} in all."
                " Close some, or wait.",
                retry_after_seconds=HEARTBEAT_SECONDS,
            )
        self._taken[user] += 1

    def leave(self, user: str) -> None:
        self._taken[user] -= 1
        if not self._taken[user]:
            del self._taken[user]


class EventStream(StreamingResponse):
    """`on_close` is called once, however it ends. Never packed: events would wait until there are enough of them."""

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
    """Lines for people, as they come."""

    media_type = "text/plain; charset=utf-8"
