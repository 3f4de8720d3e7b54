"""Watches the database of this process: which server it is, and whether its acknowledged writes are still there.

Runs periodically, on its own connection, apart from the work itself. Never decides how to react to a loss: it reports
it in the log, the audit log and the metrics.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable

from psycopg import AsyncConnection

from evertick.db import failover
from evertick.db.connect import Purpose, connect, verify_server
from evertick.db.connection import TimedConnection, each_host, parse, where
from evertick.db.failover import guard_of
from evertick.domain.errors import PostgresUnavailable
from evertick.domain.failover import FailoverResult, Server, judge, lsn_text
from evertick.observability import metrics
from evertick.observability.logging import Log

# A scheduler writes the marks and knows each of them; for other processes a recent one is enough.
LOOK_SECONDS, SELDOM_SECONDS = 1.0, 5.0
# An old primary that was not stopped still answers. If there are other hosts, ask them which one is the primary.
LOOK_AROUND_SECONDS = 5.0


class ServerWatch:
    """`get` returns an open connection to a server that this process may use. `has_marked` returns whether a mark was
    just written by other means."""

    def __init__(
        self,
        url: str,
        get: Callable[[], Awaitable[AsyncConnection]],
        log: Log,
        *,
        look_seconds: float = LOOK_SECONDS,
        has_marked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._url, self._place, self._guard = url, where(url), guard_of(url)
        self._get, self._log, self._look_seconds, self._has_marked = get, log, look_seconds, has_marked
        self._has_others = len(each_host(parse(url))) > 1
        self._looked_around = time.monotonic()
        self._actor = f"{socket.gethostname()}-{os.getpid()}"
        self._looked_at: AsyncConnection | None = None
        self._said: set[str] = set()

    async def tick(self) -> float:
        """Check once. Raises when the server may not be used."""
        if self._has_others and time.monotonic() - self._looked_around > LOOK_AROUND_SECONDS:
            self._looked_around = time.monotonic()
            await (await connect(self._url, purpose=Purpose.READ)).close()
        conn = await self._get()
        assert isinstance(conn, TimedConnection)
        if conn.is_pooled:
            await self.look_again(conn)
        if conn is not self._looked_at:
            self._say_limits(conn)
            if conn.server is not None:
                await self._compare(conn, conn.server)
            self._looked_at = conn
        if conn.server is not None and not self._has_marked():
            mark = await failover.mark(conn, conn.server, actor=self._actor)
            if mark is not None:
                self._guard.remember(mark)
        return LOOK_SECONDS if conn.is_pooled else self._look_seconds

    async def look_again(self, conn: TimedConnection) -> None:
        """A pooler changes the server behind an open connection without notice."""
        before = conn.server
        try:
            await verify_server(conn, self._guard, self._place)
        except PostgresUnavailable:
            self._guard.mark_replaced()
            raise
        if conn.server != before:
            self._looked_at = None

    async def _compare(self, conn: TimedConnection, server: Server) -> None:
        """Whether the newest acknowledged mark that this process knows is in the current database."""
        remembered = self._guard.mark
        if remembered is None:
            return
        stored = await failover.marked(conn, remembered.server)
        verdict = judge(remembered, stored, server)
        if verdict is FailoverResult.SAME:
            return
        if verdict is FailoverResult.LOST:
            await failover.report_loss(conn, remembered.server, lost_until=remembered.lsn, actor=self._actor)
        self._guard.forget_mark()
        metrics.FAILOVERS.labels(writes=verdict.value).inc()
        self._tell(verdict, remembered.server, server, stored or 0, remembered.lsn)

    def _tell(self, verdict: FailoverResult, before: Server, now: Server, stored: int, remembered: int) -> None:
        timelines = {"timeline": now.timeline, "timeline_before": before.timeline}
        if verdict is FailoverResult.LOST:
            message = (
                "Acknowledged writes are lost: the log of the old timeline between these positions, and everything"
                " after. Fires among them happen again; see docs/explanation/guarantees.md."
            )
            positions = {"after": lsn_text(stored), "until": lsn_text(remembered)}
            self._log.error("writes_lost", **timelines, **positions, message=message)
            return
        message = "No acknowledged write is lost."
        if verdict is FailoverResult.UNPROVEN:
            message = "The standby was asynchronous: writes acknowledged in the last seconds before its promotion may be lost."
        self._log.warning("failover_detected", **timelines, message=message)

    def _say_limits(self, conn: TimedConnection) -> None:
        """Log the limits of this connection, once per process."""
        if conn.is_pooled:
            self._say_once(
                "pooler_detected",
                "A transaction pooler is in front of PostgreSQL. Sessions keep no state: no prepared statements, no notifications,"
                " no instant takeover; leadership rests on its lease alone. Prefer the server's own address for Evertick.",
            )
        if conn.untold is not None:
            self._say_once(
                "failover_guard_unavailable",
                f"The server does not report its system identifier and timeline ({conn.untold}): an old primary cannot be"
                " distinguished from the new one. Grant EXECUTE on pg_control_system(), pg_walfile_name(pg_lsn) and"
                " pg_current_wal_lsn() to Evertick's role.",
            )

    def _say_once(self, event: str, message: str) -> None:
        if event not in self._said:
            self._said.add(event)
            self._log.warning(event, message=message)
