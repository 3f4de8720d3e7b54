"""The state of the database itself: dead rows, vacuum, old snapshots, table sizes, and facts for `evertick doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.db.function_sets import TABLES_SCHEMA
from evertick.db.statements import query

# A queue this long means that runners cannot keep up, not that they are about to claim it.
LONG_LINE = 1000


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that keeps dead rows from being vacuumed. `held_seconds` is None if the server does not know it.

    `behind`: how many transactions have begun since.
    """

    kind: str
    name: str
    pid: int | None
    held_seconds: float | None
    xmin: str
    behind: int


@dataclass(frozen=True, slots=True)
class TableSize:
    name: str
    bytes: int


@query
async def dead_rows(conn: AsyncConnection, tables: list[str]) -> dict[str, int]: ...


async def vacuum(conn: AsyncConnection, tables: Sequence[str]) -> None:
    """Vacuum dead rows, indexes included. Never waits for a lock, and never locks a table to truncate it."""
    options = SQL("vacuum (skip_locked, truncate off, index_cleanup on) {}")
    await conn.execute(
        options.format(SQL(", ").join(Identifier(TABLES_SCHEMA, table) for table in tables)), prepare=False
    )


@query
async def is_behind(conn: AsyncConnection, *, line: int = LONG_LINE) -> bool: ...


@query
async def snapshot_holders(conn: AsyncConnection) -> list[Holder]: ...


@query
async def sizes(conn: AsyncConnection, *, limit: int = 100) -> list[TableSize]:
    """The largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    version: str
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    autovacuum: str
    track_counts: str
    max_connections: int
    kept_connections: int
    connections: int
    role_limit: int
    role_connections: int
    at: datetime
    is_standby: bool
    encoding: str


@dataclass(frozen=True, slots=True)
class SealedBy:
    key_id: str
    count: int


@dataclass(frozen=True, slots=True)
class StoredLogs:
    """`waiting_seconds`: how long the oldest log has been waiting for archival; None if none waits."""

    are_there: bool
    waiting_seconds: float | None


@dataclass(frozen=True, slots=True)
class RemoteRow:
    """The work of one executor on one queue. `stuck`: attempts that have not started for long, `trouble`: the error of one."""

    executor: str
    queue: str
    attempts: int
    has_runner: bool
    stuck: int
    trouble: str | None


@query
async def server(conn: AsyncConnection) -> ServerFacts: ...


@query
async def sealed_by(conn: AsyncConnection) -> list[SealedBy]: ...


@query
async def stored_logs(conn: AsyncConnection) -> StoredLogs: ...


@query
async def remote(conn: AsyncConnection) -> list[RemoteRow]: ...
