"""What was set aside because it fails every time, with the reason and when it is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.store.rows import all_rows
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class SetAside:
    """`subject_id` is that of a schedule, a run or a DAG. `retry_at` is None where only a new version helps."""

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


async def list_all(conn: AsyncConnection, *, limit: int = 1000) -> list[SetAside]:
    params = {"kind": None, "subject_id": None, "limit": limit}
    return await all_rows(conn, sql("quarantine", "list"), params, SetAside)


async def find(conn: AsyncConnection, *, kind: str, subject_id: int) -> SetAside | None:
    params = {"kind": kind, "subject_id": subject_id, "limit": 1}
    found = await all_rows(conn, sql("quarantine", "list"), params, SetAside)
    return found[0] if found else None
