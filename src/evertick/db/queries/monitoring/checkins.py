"""Check-ins of jobs that run elsewhere, and whether every due instant is accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query


@dataclass(frozen=True, slots=True)
class Checkin:
    """`due_at`: when the next report is expected; it is late `grace_seconds` after that. `late_since`: since when an
    alert is open. `has_failed`: the last report said so."""

    name: str
    spec: dict[str, object]
    grace_seconds: float
    due_at: datetime
    last_at: datetime | None
    message: str | None
    has_failed: bool
    count: int
    late_since: datetime | None
    changed_by: str
    changed_at: datetime


@query
async def list_of(conn: AsyncConnection, *, after: str, only_late: bool, limit: int) -> list[Checkin]: ...


@query
async def find(conn: AsyncConnection, *, name: str) -> Checkin | None: ...


@query
async def unaccounted(conn: AsyncConnection, *, late_seconds: float) -> int: ...
