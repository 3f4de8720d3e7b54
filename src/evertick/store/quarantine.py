"""Quarantined rows: rows that fail every time, with the reason and the time of the next retry."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql

# Before every row.
FIRST = ("-infinity", "", 0)


@dataclass(frozen=True, slots=True)
class SetAside:
    """`subject_id` is that of a schedule, a run or a DAG. `retry_at` is None if only a new version helps."""

    kind: str
    subject_id: int
    verb: str
    reason: str
    failures: int
    since: datetime
    failed_at: datetime
    retry_at: datetime | None
    dag: str | None
    schedule: str | None


async def list_all(conn: AsyncConnection, *, after: tuple[str, str, int] = FIRST, limit: int = 1000) -> list[SetAside]:
    """`after`: the time, the kind and the id of the last row of the previous page."""
    return await all_rows(conn, sql("quarantine", "list"), _params(None, None, after, limit), SetAside)


async def find(conn: AsyncConnection, *, kind: str, subject_id: int) -> SetAside | None:
    found = await all_rows(conn, sql("quarantine", "list"), _params(kind, subject_id, FIRST, 1), SetAside)
    return found[0] if found else None


def _params(kind: str | None, subject_id: int | None, after: tuple[str, str, int], limit: int) -> dict[str, object]:
    last = {"after_since": after[0], "after_kind": after[1], "after_id": after[2]}
    return {"kind": kind, "subject_id": subject_id, "limit": limit, **last}
