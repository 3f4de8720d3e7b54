"""A connection that is opened when needed and reopened after it broke, and the notifications sent on one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import psycopg
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.connection import TimedConnection, has_own_session
from evertick.db.failover import guard_of
from evertick.db.notify import Channel, listen, notify
from evertick.domain.errors import PostgresUnavailable
from evertick.domain.failover import Server
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.loop import back_off, in_background, run_loop
from evertick.runtime.server_watch import LOOK_SECONDS, ServerWatch

# NOTIFY takes one cluster-wide lock at commit: a busy runner notifies a hundred times per second, not thousands.
COALESCE_SECONDS = 0.01
# LISTEN does not work behind a transaction pooler; retry from time to time, in case the setup has changed.
POOLED_PAUSE_SECONDS = 60.0


class ReconnectingConnection:
    """One connection for one purpose. Not shared between tasks that must not wait for each other.

    It is reopened when it broke, and when this process has learned that another server is the primary.
    """

    def __init__(self, url: str, purpose: Purpose) -> None:
        self._url, self._purpose = url, purpose
        self._guard = guard_of(url)
        self._conn: AsyncConnection | None = None
        self._alarms = 0
        self._opening = asyncio.Lock()
        self.reconnects = -1

    @property
    def server(self) -> Server | None:
        """The server it is connected to. Changes with a failover; None before the first connection, or if the server
        does not identify itself."""
        return self._conn.server if isinstance(self._conn, TimedConnection) else None

    async def get(self) -> AsyncConnection:
        if self._conn is not None and self.is_good():
            return self._conn
        async with self._opening:
            if self._conn is None or not self.is_good():
                await self.close()
                self._alarms = self._guard.alarms
                self._conn = await connect(self._url, purpose=self._purpose)
                self.reconnects += 1
                if self.reconnects:
                    metrics.RECONNECTS.labels(purpose=self._purpose.value).inc()
            return self._conn

    def is_good(self) -> bool:
        """Whether the connection is open and leads to the current primary."""
        conn = self._conn
        is_open = conn is not None and not conn.closed and not conn.broken
        return is_open and self._alarms == self._guard.alarms and self._guard.trusts(self.server)

    async def close_unless_idle(self) -> None:
        """Close it unless it is idle and usable. For a caller that is its only user, between two uses."""
        if not (isinstance(self._conn, TimedConnection) and self._conn.is_idle):
            await self.close()

    @asynccontextmanager
    async def with_deadline(self, seconds: float) -> AsyncIterator[AsyncConnection]:
        """The connection, for work with a deadline. When the deadline passes, the socket is cut and the work ends with
        an error.

        The server's own timeouts do not help when the network drops its answers.
        """
        async with asyncio.timeout(seconds):
            await self.get()
        timer = asyncio.get_running_loop().call_later(seconds, self.abort)
        try:
            yield await self.get()
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Cut the socket now, so that callers that wait for an answer stop waiting."""
        if isinstance(self._conn, TimedConnection):
            self._conn.abort()

    async def close(self) -> None:
        if self._conn is not None:
            with suppress(psycopg.Error, OSError):
                await self._conn.close()
            self._conn = None


async def listen_forever(url: str, channels: list[Channel], on_wake: Callable[[Channel], None], *, log: Log) -> None:
    """Listen until canceled. While the connection is down nothing is lost: waiting processes poll."""
    failures = 0
    while True:
        link = ReconnectingConnection(url, Purpose.LISTEN)
        pause_seconds = back_off(max(failures, 1))
        try:
            conn = await link.get()
            failures = 0
            if has_own_session(conn):
                await listen(conn, channels, on_wake, is_wanted=link.is_good)
            else:
                # Behind a pooler another client would use the listening session the next moment.
                pause_seconds = POOLED_PAUSE_SECONDS
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            failures += 1
            pause_seconds = back_off(failures)
            if failures == 1:
                log.warning("listen_failed", error=error)
        finally:
            await link.close()
        await asyncio.sleep(pause_seconds)


class Notifier:
    """Sends notifications on its own connection: the first at once, then at most one per ten milliseconds.

    The same connection watches the database server.
    """

    def __init__(
        self,
        url: str,
        *,
        is_enabled: bool,
        log: Log,
        look_seconds: float = LOOK_SECONDS,
        has_marked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = ReconnectingConnection(url, Purpose.MONITOR)
        self._watch = ServerWatch(url, self._link.get, log, look_seconds=look_seconds, has_marked=has_marked)
        self._is_enabled, self._log = is_enabled, log
        self._wanted: set[Channel] = set()
        self._has_work = asyncio.Event()

    def wake(self, channel: Channel) -> None:
        if self._is_enabled:
            self._wanted.add(channel)
            self._has_work.set()

    async def run(self) -> None:
        """Run until canceled."""
        async with in_background(self._send_for_ever()):
            await run_loop(self._watch.tick, name="watch", log=self._log, pulse=LoopHealth("watch", is_essential=False))

    async def _send_for_ever(self) -> None:
        """A notification that cannot be sent is dropped: it only shortens waits."""
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
