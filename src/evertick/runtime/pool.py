"""A small pool of database connections for HTTP requests, separate so that no reader takes one from the scheduler (H4).

Connections open when a request needs one and close after a while without requests: an idle API costs the database nothing.
Why not psycopg_pool: docs/decisions/0037-libraries.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg import AsyncConnection

from evertick.db.connect import Purpose
from evertick.domain.errors import PostgresUnavailable
from evertick.runtime.connections import ReconnectingConnection

WAIT_SECONDS = 5.0
IDLE_SECONDS = 30.0


class Pool:
    """At most `size` connections of one purpose. A caller that waits too long for one gets PostgresUnavailable."""

    def __init__(self, url: str, purpose: Purpose, size: int) -> None:
        self._url, self._purpose, self._size = url, purpose, size
        self._free = asyncio.Semaphore(size)
        self._idle: list[tuple[float, ReconnectingConnection]] = []
        self._is_idle = asyncio.Event()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[AsyncConnection]:
        if self._free.locked():
            await self._wait_for_connection()
        else:
            await self._free.acquire()
        link = self._idle.pop()[1] if self._idle else ReconnectingConnection(self._url, self._purpose)
        try:
            # A request whose client hung up was canceled at any point and may have left a statement running; the next would fail.
            await link.close_unless_idle()
            yield await link.get()
        except BaseException:
            await link.close_unless_idle()
            raise
        finally:
            self._idle.append((time.monotonic(), link))
            self._is_idle.set()
            self._free.release()

    async def _wait_for_connection(self) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise PostgresUnavailable(f"All {self._size} database connections of the API are busy.") from None

    async def tend(self) -> None:
        """Close connections that are unused for a while, until canceled. Sleeps while none is open."""
        try:
            while True:
                await self._is_idle.wait()
                await asyncio.sleep(IDLE_SECONDS)
                oldest = time.monotonic() - IDLE_SECONDS
                old = [link for since, link in self._idle if since <= oldest]
                self._idle = [each for each in self._idle if each[0] > oldest]
                if not self._idle:
                    self._is_idle.clear()
                for link in old:
                    await link.close()
        finally:
            for _, link in self._idle:
                await link.close()
            self._idle.clear()
