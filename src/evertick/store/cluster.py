"""Identifies the server behind a connection, and keeps the marks that reveal a loss of acknowledged writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection, errors
from psycopg.rows import class_row

from evertick.domain.failover import Mark, Server
from evertick.store.function_sets import lock_key, own_set
from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql

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
class Sight:
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


@dataclass(frozen=True, slots=True)
class _Marked:
    lsn: int
    is_synchronous: bool


async def look(conn: AsyncConnection) -> Sight:
    """Never by a prepared statement: whether this session keeps those is what we are about to find out."""
    params = {"pid": conn.info.backend_pid, "functions": lock_key(own_set().hash)}
    async with conn.cursor(row_factory=class_row(Sight)) as cursor:
        try:
            await cursor.execute(sql("cluster", "look"), params, prepare=False)
            untold = None
        except _UNTOLD as error:
            untold = str(error).splitlines()[0]
            await cursor.execute(sql("cluster", "look_without_rights"), params, prepare=False)
        found = await cursor.fetchone()
    assert found is not None
    return found if untold is None else replace(found, system_id=None, timeline=None, untold=untold)


async def mark(conn: AsyncConnection, server: Server, *, actor: str) -> Mark | None:
    """A committed mark of this server, by this process or by another a moment ago. None: there is none yet."""
    params = {"system_id": server.system_id, "timeline": server.timeline, "seconds": MARK_SECONDS, "actor": actor}
    found = await one_row(conn, sql("cluster", "mark"), params, _Marked)
    return None if found is None else Mark(server=server, lsn=found.lsn, is_synchronous=found.is_synchronous)


async def marked(conn: AsyncConnection, server: Server) -> int | None:
    """The position of that server's newest mark in the current database."""
    params = {"system_id": server.system_id, "timeline": server.timeline}
    return cast("int | None", await one_value(conn, sql("cluster", "marked"), params))


async def report_loss(conn: AsyncConnection, server: Server, *, lost_until: int, actor: str) -> None:
    params = {"system_id": server.system_id, "timeline": server.timeline, "lost_until": lost_until, "actor": actor}
    await conn.execute(sql("cluster", "report_loss"), params)


async def history(conn: AsyncConnection, *, limit: int = 20) -> list[Timeline]:
    """Newest first."""
    return await all_rows(conn, sql("cluster", "history"), {"limit": limit}, Timeline)
