"""The data of `evertick doctor`: facts about the server and the work in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_row
from evertick.store.statements import sql


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
class FarRow:
    """The work of one executor on one queue. `stuck`: attempts that have not started for long, `trouble`: the error of one."""

    executor: str
    queue: str
    attempts: int
    has_runner: bool
    stuck: int
    trouble: str | None


async def server(conn: AsyncConnection) -> ServerFacts:
    return cast(ServerFacts, await one_row(conn, sql("checkup", "server"), {}, ServerFacts))


async def sealed_by(conn: AsyncConnection) -> list[SealedBy]:
    return await all_rows(conn, sql("checkup", "sealed_by"), {}, SealedBy)


async def stored_logs(conn: AsyncConnection) -> StoredLogs:
    return cast(StoredLogs, await one_row(conn, sql("checkup", "stored_logs"), {}, StoredLogs))


async def far(conn: AsyncConnection) -> list[FarRow]:
    return await all_rows(conn, sql("checkup", "far"), {}, FarRow)
