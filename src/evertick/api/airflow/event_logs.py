"""Event logs: the audit log in Airflow's format."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from evertick.api.airflow.asking import Paged, Pattern, Small, begins, columns, contains, paged
from evertick.api.airflow.models import EventLogCollectionResponse, EventLogResponse
from evertick.api.desk import Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.store import event_log
from evertick.store.event_log import EventFilter, ListedEvent
from evertick.store.pages import Asked
from evertick.store.spans import between_instants

router = APIRouter(route_class=GuardedRoute, tags=["Event Log"])

ORDER = {
    "id": ["entry_id"],
    "event_log_id": ["entry_id"],
    "dttm": ["occurred_at"],
    "when": ["occurred_at"],
    "dag_id": ["dag"],
    "task_id": ["task"],
    "run_id": ["text_id"],
    "event": ["verb"],
    "logical_date": ["fire_at"],
    "owner": ["actor"],
    "extra": ["detail"],
}


class EventQuery(Paged):
    dag_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    map_index: Small | None = None
    try_number: Small | None = None
    owner: str | None = None
    event: str | None = None
    excluded_events: list[str] | None = None
    included_events: list[str] | None = None
    before: datetime | None = None
    after: datetime | None = None
    dag_id_pattern: Pattern = None
    task_id_pattern: Pattern = None
    run_id_pattern: Pattern = None
    owner_pattern: Pattern = None
    event_pattern: Pattern = None
    dag_id_prefix_pattern: Pattern = None
    task_id_prefix_pattern: Pattern = None
    run_id_prefix_pattern: Pattern = None
    owner_prefix_pattern: Pattern = None
    event_prefix_pattern: Pattern = None


@router.get("/eventLogs", response_model=EventLogCollectionResponse)
@needs(Permission.READ_AUDIT)
async def get_event_logs(caller: Who, asked: Annotated[EventQuery, Query()]) -> dict[str, Any]:
    order = columns(asked.order_by, ORDER)
    wanted = EventFilter(
        dag=asked.dag_id,
        task=asked.task_id,
        text_id=asked.run_id,
        map_index=asked.map_index,
        actor=asked.owner,
        verb=asked.event,
        verbs=asked.included_events or None,
        without=asked.excluded_events or None,
        occurred=between_instants(None, asked.after, None, asked.before),
        dag_like=contains(asked.dag_id_pattern),
        dag_heads=begins(asked.dag_id_prefix_pattern),
        task_like=contains(asked.task_id_pattern),
        task_heads=begins(asked.task_id_prefix_pattern),
        run_like=contains(asked.run_id_pattern),
        run_heads=begins(asked.run_id_prefix_pattern),
        actor_like=contains(asked.owner_pattern),
        actor_heads=begins(asked.owner_prefix_pattern),
        verb_like=contains(asked.event_pattern),
        verb_heads=begins(asked.event_prefix_pattern),
    )
    if asked.try_number is not None:
        # Audit entries have no try number.
        return {"event_logs": [], "total_entries": 0}
    async with caller.reading() as conn:
        found, total = await event_log.list_events(conn, wanted, paged(asked, order))
    return {"event_logs": [_document(row) for row in found], "total_entries": total}


@router.get("/eventLogs/{event_log_id}", response_model=EventLogResponse)
@needs(Permission.READ_AUDIT)
async def get_event_log(event_log_id: Annotated[int, Path(ge=0, le=2**63 - 1)], caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        found, _ = await event_log.list_events(conn, EventFilter(entry_id=event_log_id), Asked(limit=1))
    if not found:
        raise NotFound(f"The Event Log with id: `{event_log_id}` not found")
    return _document(found[0])


def _document(row: ListedEvent) -> dict[str, Any]:
    return {
        "event_log_id": row.entry_id,
        "when": row.occurred_at,
        "dag_id": row.dag,
        "dag_display_name": row.dag,
        "task_id": row.task,
        "task_display_name": row.task,
        "run_id": row.text_id,
        "map_index": row.map_index,
        "event": row.verb,
        "logical_date": row.fire_at,
        "owner": row.actor,
        "extra": json.dumps(row.detail),
    }
