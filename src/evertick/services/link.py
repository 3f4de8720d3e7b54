"""A connection that is opened when it is needed, and opened again after it broke. And the wake-ups that travel on one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg import AsyncConnection

from evertick.domain.errors import PostgresUnavailable
from evertick.services.events import Log
from evertick.services.loop import back_off
from evertick.store.db import Purpose, connect
from evertick.store.wake import Channel, listen, notify

# NOTIFY takes one cluster-wide lock at commit: a busy runner wakes others a hundred times per second, not thousands.
COALESCE_SECONDS = 0.01


class Link:
    """One connection for one purpose. Not shared between tasks that must not wait for each other."""

    def __init__(self, url: str, purpose: Purpose) -> None:
        self._url, self._purpose = url, purpose
        self._conn: AsyncConnection | None = None
        self.reconnects = -1

    async def get(self) -> AsyncConnection:
        if self._conn is None or self._conn.closed or self._conn.broken:
            await self.close()
            self._conn = await connect(self._url, purpose=self._purpose)
            self.reconnects += 1
        return self._conn

    async def close(self) -> None:
        if self._conn is not None:
            with suppress(psycopg.Error, OSError):
                await self._conn.close()
            self._conn = None


async def keep_listening(url: str, channels: list[Channel], on_wake: Callable[[Channel], None], *, log: Log) -> None:
    """Listen for ever. While the line is down nothing is lost: whoever waits polls."""
    failures = 0
    while True:
        link = Link(url, Purpose.LISTEN)
        try:
            conn = await link.get()
            failures = 0
            await listen(conn, channels, on_wake)
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            failures += 1
            if failures == 1:
                log.warning("not_listening", error=error)
        finally:
            await link.close()
        await asyncio.sleep(back_off(max(failures, 1)))


class Waker:
    """Sends wake-ups on a connection of its own, the first at once and then at most one per ten milliseconds."""

    def __init__(self, url: str, *, is_enabled: bool) -> None:
        self._link = Link(url, Purpose.LISTEN)
        self._is_enabled = is_enabled
        self._wanted: set[Channel] = set()
        self._has_work = asyncio.Event()

    def wake(self, channel: Channel) -> None:
        if self._is_enabled:
            self._wanted.add(channel)
            self._has_work.set()

    async def run(self) -> None:
        """Until canceled. A wake-up that cannot be sent is dropped: it only shortens waits."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            channels, self._wanted = self._wanted, set()
            with suppress(psycopg.Error, PostgresUnavailable, OSError):
                conn = await self._link.get()
                for channel in sorted(channels):
                    await notify(conn, channel)
            await asyncio.sleep(COALESCE_SECONDS)

    async def close(self) -> None:
        await self._link.close()
