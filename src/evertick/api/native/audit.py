"""The audit log: what was done and what was refused, newest first."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.queries import accounts
from evertick.db.queries.accounts import AuditFilter, AuditRow
from evertick.domain.access import Permission

router = APIRouter(route_class=GuardedRoute, tags=["audit"])

# So many entries are looked at for one page: 5 ms.
WINDOW = 5000

Text = Annotated[str | None, Query(max_length=300)]


@router.get("/audit")
@requires(Permission.READ_AUDIT)
async def list_entries(
    caller: Who,
    verb: Text = None,
    actor: Text = None,
    dag: Text = None,
    run_id: Annotated[int | None, Query(ge=1, le=LARGEST)] = None,
    since: datetime | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[AuditRow]:
    """Who did what, when, from where; before and after where something was changed. With a filter a page may be short and still
    have a next one."""
    (before,) = read_cursor(cursor_text, LARGEST)
    wanted = AuditFilter(verb=verb, actor=actor, dag=dag, run_id=run_id, since=since)
    async with caller.reading() as conn:
        found, end = await accounts.audit_page(conn, wanted, before=before, limit=limit, window=max(WINDOW, limit))
    return Page(items=found, next_cursor=None if end is None else cursor(end))
