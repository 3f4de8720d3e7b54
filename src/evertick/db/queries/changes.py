"""Changes since an earlier poll: runs, tasks and audit entries for live pages, ended runs for traces.

Never misses a row that a later transaction wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query

_XID_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ChangeMark:
    """`oldest`: the oldest transaction that was open; `next`: the first one not yet started. The newest ids seen."""

    oldest: int
    next: int
    newest_run: int
    newest_entry: int
    at: datetime


@dataclass(frozen=True, slots=True)
class ChangedRun:
    run_id: int
    dag_id: int
    state: str
    open_tasks: int
    started_at: datetime | None
    finished_at: datetime | None
    written_by: int


@dataclass(frozen=True, slots=True)
class ChangedTask:
    run_id: int
    dag_id: int
    task: str
    map_index: int
    state: str
    attempt: int
    started_at: datetime | None
    finished_at: datetime | None
    written_by: int


@dataclass(frozen=True, slots=True)
class AuditChange:
    entry_id: int
    occurred_at: datetime
    verb: str
    dag_id: int | None
    run_id: int | None
    task: str | None
    map_index: int | None
    subject: str | None
    backfill: int | None
    state: str | None
    written_by: int


@dataclass(frozen=True, slots=True)
class TaggedDag:
    dag_id: int
    name: str
    tags: list[str]


@query
async def mark(conn: AsyncConnection) -> ChangeMark: ...


@query
async def open_run_ids(conn: AsyncConnection, *, limit: int) -> list[int]:
    """Newest first."""


@query
async def changed_runs(
    conn: AsyncConnection, *, since: str, after: int, were_open: list[int], limit: int
) -> list[ChangedRun]:
    """Rows written by transaction `since` (`xid`) or later; finished runs only with an id above `after`, or if they were open."""


@query
async def entries(conn: AsyncConnection, *, since: str, after: int, limit: int) -> list[AuditChange]: ...


@query
async def watched(
    conn: AsyncConnection, *, dags: list[str], is_all: bool, moved: list[int], limit: int
) -> list[int]: ...


@query
async def tasks(conn: AsyncConnection, *, since: str, run_ids: list[int], limit: int) -> list[ChangedTask]: ...


@query
async def tagged_dags(conn: AsyncConnection, dag_ids: list[int]) -> list[TaggedDag]: ...


def xid(full: int) -> str:
    """The 32-bit transaction id that rows store: without the wraparound epoch."""
    return str(full & _XID_MASK)


@dataclass(frozen=True, slots=True)
class EndedRun:
    run_id: int
    dag: str
    version: int
    kind: str
    fire_at: datetime | None
    created_at: datetime
    state: str
    finished_at: datetime
    reason: str | None


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    run_id: int
    idx: int
    map_index: int
    task: str
    queue: str
    epoch: int
    attempt: int
    outcome: str
    reason: str | None
    started_at: datetime
    finished_at: datetime
    runner_id: str | None
    host: str | None
    ready_at: datetime


@query
async def newest(conn: AsyncConnection) -> int: ...


@query
async def ended_after(conn: AsyncConnection, after: int, *, limit: int) -> list[int]: ...


@query
async def runs(conn: AsyncConnection, run_ids: list[int]) -> list[EndedRun]:
    """The finished ones of these runs."""


@query
async def attempts(conn: AsyncConnection, run_ids: list[int], *, limit: int) -> list[EndedAttempt]: ...
