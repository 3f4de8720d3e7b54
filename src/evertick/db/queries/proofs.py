"""What violates a guarantee, and how far the continuous proof is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, query, sql
from evertick.domain.proofs import Check

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class ViolationRow:
    """`name`: of what is no task and no run."""

    run_id: int | None
    idx: int | None
    map_index: int | None
    detail: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    entry_id: int
    run_id: int | None
    is_trigger: bool
    is_lost: bool


@dataclass(frozen=True, slots=True)
class ProvenUntil:
    """`pruned_before`: the retention has deleted runs that ended before it."""

    until: datetime | None
    pruned_before: datetime | None


@dataclass(frozen=True, slots=True)
class ScheduleVersionRow:
    schedule_id: int
    version: int
    changed_at: datetime
    is_deleted: bool
    is_paused_directly: bool
    spec: str
    delay_seconds: float
    until: datetime | None


@dataclass(frozen=True, slots=True)
class UnansweredFire:
    schedule_id: int
    at: datetime
    runs: int
    skips: int


@dataclass(frozen=True, slots=True)
class ProofCursor:
    check_name: str
    position: JsonObject | None
    checked: int
    checked_at: datetime


@dataclass(frozen=True, slots=True)
class FoundViolation:
    violation_id: int
    check_name: str
    run_id: int | None
    task: str | None
    map_index: int | None
    subject: str
    detail: str
    found_at: datetime
    seen_at: datetime
    ended_at: datetime | None


async def violations(
    conn: AsyncConnection, check: Check, *, runs: list[int] | None = None, limit: int = 100
) -> list[ViolationRow]:
    """The statement of a check; of these runs, or of all live work."""
    return await all_rows(conn, sql("proofs", check), {"runs": runs, "limit": limit}, ViolationRow)


@query
async def open_runs(conn: AsyncConnection, *, dag_id: int, run_id: int, limit: int) -> list[tuple[int, int]]: ...


@query
async def ended_runs(
    conn: AsyncConnection, *, since: datetime, run_id: int, until: datetime, limit: int
) -> list[tuple[int, datetime]]: ...


@query
async def trigger_lost(conn: AsyncConnection, *, after: int, until: datetime, limit: int) -> list[Trigger]: ...


@query
async def first_entry(conn: AsyncConnection, *, since: datetime) -> int: ...


@query
async def proven_until(conn: AsyncConnection, *, since: datetime, until: datetime) -> ProvenUntil: ...


@query
async def schedule_versions(conn: AsyncConnection, *, after: int, limit: int) -> list[ScheduleVersionRow]: ...


@query
async def fire_unanswered(
    conn: AsyncConnection, *, ids: list[int], instants: list[datetime]
) -> list[UnansweredFire]: ...


@query
async def cursors(conn: AsyncConnection) -> list[ProofCursor]: ...


@query
async def found(conn: AsyncConnection, *, with_ended: bool, limit: int) -> list[FoundViolation]: ...
