"""What did not happen in time, and what was set aside because it fails every time."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Query

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.queries import notifications
from evertick.db.queries.notifications import Alert, QuarantinedRow
from evertick.domain.access import Permission

router = APIRouter(route_class=GuardedRoute, tags=["troubles"])

Dag = Annotated[str | None, Query(max_length=1000)]
All = Annotated[bool, Query(alias="all", description="Also those that are over.")]


@router.get("/alerts")
@requires(Permission.READ_SCHEDULES)
async def list_alerts(
    caller: Who, dag: Dag = None, everything: All = False, limit: Limit = USUAL_ITEMS, cursor_text: Cursor = None
) -> Page[Alert]:
    """Schedules that did not fire, and runs that did not start or finish, in time. Open ones first, then the latest."""
    is_over, before = read_cursor(cursor_text, 0, LARGEST)
    async with caller.reading() as conn:
        if dag is not None:
            await caller.dag(conn, dag)
        wanted = notifications.AlertFilter(
            dag=dag, ended=everything, dag_ids=await caller.visible(conn), is_over=bool(is_over), before=before
        )
        found = await notifications.list_alerts(conn, wanted, limit=limit)
    last = cursor(int(found[-1].ended_at is not None), found[-1].alert_id) if len(found) == limit else None
    return Page(items=found, next_cursor=last)


@router.get("/quarantine")
@requires(Permission.READ_IMPORTS)
async def list_set_aside(caller: Who, limit: Limit = USUAL_ITEMS, cursor_text: Cursor = None) -> Page[QuarantinedRow]:
    """Runs, schedules and DAGs that fail every time, since when, and when each is tried again. The oldest first."""
    after = cast("tuple[str, str, int]", read_cursor(cursor_text, *notifications.FIRST))
    async with caller.reading() as conn:
        found = await notifications.list_quarantined(conn, after=after, limit=limit)
    last = found[-1] if len(found) == limit else None
    next_cursor = cursor(last.since.isoformat(), last.kind, last.subject_id) if last is not None else None
    return Page(items=found, next_cursor=next_cursor)
