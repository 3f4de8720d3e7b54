"""The journal by many filters, with an offset and a total. By key and newest first it is in `access`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.types.range import Range

from evertick.store.pages import Asked, read_page
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class ListedEvent:
    entry_id: int
    occurred_at: datetime
    verb: str
    actor: str
    dag: str | None
    text_id: str | None
    fire_at: datetime | None
    task: str | None
    map_index: int | None
    detail: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """What is None is not asked."""

    entry_id: int | None = None
    dag: str | None = None
    task: str | None = None
    text_id: str | None = None
    map_index: int | None = None
    actor: str | None = None
    verb: str | None = None
    verbs: list[str] | None = None
    without: list[str] | None = None
    occurred: Range[datetime] | None = None
    dag_like: list[str] | None = None
    dag_heads: list[str] | None = None
    task_like: list[str] | None = None
    task_heads: list[str] | None = None
    run_like: list[str] | None = None
    run_heads: list[str] | None = None
    actor_like: list[str] | None = None
    actor_heads: list[str] | None = None
    verb_like: list[str] | None = None
    verb_heads: list[str] | None = None


async def list_events(conn: AsyncConnection, wanted: EventFilter, asked: Asked) -> tuple[list[ListedEvent], int]:
    """Oldest first unless asked otherwise."""
    never_null = frozenset({"entry_id", "occurred_at"})
    return await read_page(
        conn, sql("event_log", "list"), asdict(wanted), asked, ListedEvent, never_null=never_null, is_small=False
    )
