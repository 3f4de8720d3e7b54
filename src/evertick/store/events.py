"""Events that were sent from outside for tasks that wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.domain.params import JsonValue
from evertick.store.rows import all_rows, one_row
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class Sent:
    """`is_new`: False for a key that was sent before; the record then describes the earlier event."""

    event_id: int
    is_new: bool
    sent_at: datetime
    sent_by: str


@dataclass(frozen=True, slots=True)
class EventRow:
    """`is_heard`: it was delivered to the tasks that waited when it arrived."""

    event_id: int
    name: str
    key: str | None
    payload: object
    sent_at: datetime
    sent_by: str
    is_heard: bool


async def send(conn: AsyncConnection, *, name: str, key: str | None, payload: JsonValue, actor: str) -> Sent | None:
    given = {"name": name, "key": key, "payload": Json(payload), "actor": actor}
    return await one_row(conn, sql("events", "send"), given, Sent)


async def list_events(conn: AsyncConnection, *, name: str | None = None, limit: int = 100) -> list[EventRow]:
    return await all_rows(conn, sql("events", "list_events"), {"name": name, "limit": limit}, EventRow)
