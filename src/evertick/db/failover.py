"""The failover guard: the timeline and position of the server behind a URL, so that a replaced one is never written to.

Kept per process, not per connection: all its connections must agree, across threads too. A restart clears it, which
is how an operator confirms that a restore was intended.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field, replace
from datetime import datetime

from psycopg import AsyncConnection, errors
from psycopg.rows import class_row

from evertick.db.connection import TimedConnection
from evertick.db.function_sets import lock_key, own_set
from evertick.db.statements import query, sql
from evertick.domain.errors import StaleServer
from evertick.domain.failover import Server, WalMark, refusal


@dataclass(slots=True)
class ServerGuard:
    """`seen` is the server with the highest timeline; `mark` the newest mark known to be committed there."""

    seen: Server | None = None
    mark: WalMark | None = None
    alarms: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lines: weakref.WeakSet[TimedConnection] = field(default_factory=weakref.WeakSet)

    def accept(self, found: Server | None, place: str) -> None:
        """Record a server, or raise if it was replaced. A server that does not reveal its identity cannot be refused.

        Connections that still wait for a reply of its predecessor are cut: a commit there may never return.
        """
        if found is None:
            return
        with self._lock:
            if why := refusal(self.seen, found):
                raise StaleServer(f"The PostgreSQL at {place} is refused: {why}.")
            if found != self.seen:
                self.seen = found
                for line in [line for line in self._lines if not self.trusts(line.server)]:
                    line.abort()

    def watch_over(self, line: TimedConnection) -> None:
        with self._lock:
            self._lines.add(line)

    def trusts(self, server: Server | None) -> bool:
        """Whether a connection that led to `server` when it was opened may still be used."""
        return server is self.seen or server is None or server == self.seen

    def mark_replaced(self) -> None:
        """Another server has appeared behind an open connection: all connections must be opened again."""
        self.alarms += 1

    def remember(self, mark: WalMark) -> None:
        with self._lock:
            if self.mark is None or mark.server != self.mark.server or mark.lsn > self.mark.lsn:
                self.mark = mark

    def follow_up(self, mark: WalMark) -> bool:
        """Record a later mark of the same server; returns whether it is one. Another server's first mark follows the comparison."""
        with self._lock:
            is_later = self.mark is not None and mark.server == self.mark.server and mark.lsn > self.mark.lsn
            if is_later:
                self.mark = mark
            return is_later

    def forget_mark(self) -> None:
        """The mark was compared with the database, and the result was reported."""
        self.mark = None


_guards: dict[str, ServerGuard] = {}


def guard_of(url: str) -> ServerGuard:
    return _guards.setdefault(url, ServerGuard())


# The first process that finds an old mark replaces it; the others then skip the write for this long.
MARK_SECONDS = 1.0


# Errors of servers that do not reveal their identity: a missing privilege, or a PostgreSQL variant without its own WAL.
_UNTOLD = (
    errors.InsufficientPrivilege,
    errors.FeatureNotSupported,
    errors.UndefinedFunction,
    errors.ObjectNotInPrerequisiteState,
    errors.InternalError_,
)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server's report about itself and the session. `system_id` and `timeline` are None if it does not reveal them."""

    system_id: int | None
    timeline: int | None
    is_standby: bool
    pid: int
    search_path: str
    holds_functions: bool | None
    untold: str | None = None

    @property
    def server(self) -> Server | None:
        if self.system_id is None or self.timeline is None:
            return None
        return Server(system_id=self.system_id, timeline=self.timeline)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One server on which this database has been, for people."""

    system_id: int
    timeline: int
    first_seen_at: datetime
    lsn: str
    is_synchronous: bool
    lost_until: str | None


async def read_server_status(conn: AsyncConnection) -> ServerStatus:
    """Never by a prepared statement: whether this session keeps those is what we are about to find out."""
    params = {"pid": conn.info.backend_pid, "functions": lock_key(own_set().hash)}
    async with conn.cursor(row_factory=class_row(ServerStatus)) as cursor:
        try:
            await cursor.execute(sql("failover", "look"), params, prepare=False)
            untold = None
        except _UNTOLD as error:
            untold = str(error).splitlines()[0]
            await cursor.execute(sql("failover", "look_without_rights"), params, prepare=False)
        found = await cursor.fetchone()
    assert found is not None
    return found if untold is None else replace(found, system_id=None, timeline=None, untold=untold)


@query
async def mark_server(
    conn: AsyncConnection, server: Server, *, actor: str, seconds: float = MARK_SECONDS
) -> tuple[int, bool] | None:
    """The position of the newest mark, and whether commits wait for a standby."""


async def mark(conn: AsyncConnection, server: Server, *, actor: str) -> WalMark | None:
    """A committed mark of this server, by this process or by another a moment ago. None: there is none yet."""
    found = await mark_server(conn, server, actor=actor)
    return None if found is None else WalMark(server=server, lsn=found[0], is_synchronous=found[1])


@query
async def marked(conn: AsyncConnection, server: Server) -> int | None:
    """The position of that server's newest mark in the current database."""


@query
async def report_loss(conn: AsyncConnection, server: Server, *, lost_until: int, actor: str) -> None: ...


@query
async def history(conn: AsyncConnection, *, limit: int = 20) -> list[Timeline]:
    """Newest first."""
