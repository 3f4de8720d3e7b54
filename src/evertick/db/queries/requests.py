"""Requests for runs: the inbox, dead letters, and when delayed runs begin."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection

from evertick.db.statements import query


@dataclass(frozen=True, slots=True)
class InboxRow:
    inbox_id: int
    dag: str
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that could not become a run, with the reason. `replayed_at`: when it was put back into the inbox."""

    letter_id: int
    dag: str
    params: dict[str, Any]
    key: str | None
    run_at: datetime | None
    unique_for_seconds: float | None
    sent_at: datetime
    sent_by: str
    reason: str
    failed_at: datetime
    replayed_at: datetime | None
    replayed_by: str | None


@query
async def inbox(conn: AsyncConnection, *, limit: int) -> list[InboxRow]: ...


@query
async def dead_letters(conn: AsyncConnection, *, before: int, is_all: bool, limit: int) -> list[DeadLetter]:
    """The newest first; `is_all`: also those that were replayed."""


@query
async def find_letter(conn: AsyncConnection, *, letter_id: int) -> DeadLetter | None: ...


@query
async def start_of_run(conn: AsyncConnection, *, run_id: int) -> datetime | None:
    """When a delayed run begins; None for any other."""
