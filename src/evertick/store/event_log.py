"""The journal by many filters, with an offset and a total. `access` reads it by key, newest first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.types.range import Range

from evertick.store.pages import Asked, read_page
from evertick.store.run_lists import RunFilter, dags_of, numbers_of
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
    """A filter that is None does not apply."""

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
    """Oldest first by default. DAGs and runs are filtered by their ids, which entries store: names would have to be looked up
    for each entry."""
    named = None if wanted.dag is None else [wanted.dag]
    among = RunFilter(dags=named, dag_like=wanted.dag_like, dag_heads=wanted.dag_heads)
    is_of_dags = any(each is not None for each in (wanted.dag, wanted.dag_like, wanted.dag_heads))
    dag_ids = await dags_of(conn, asdict(among)) if is_of_dags else None
    run_ids = None if wanted.text_id is None else await numbers_of(conn, [wanted.text_id], asdict(among))
    if [] in (dag_ids, run_ids):
        return [], 0
    params = {**asdict(wanted), "dag_ids": dag_ids, "run_ids": run_ids}
    never_null = frozenset({"entry_id", "occurred_at"})
    return await read_page(
        conn, sql("event_log", "list"), params, asked, ListedEvent, never_null=never_null, is_small=False
    )
