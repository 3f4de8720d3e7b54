"""The audit log: every change with actor, time and address, and refused requests."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.paging import LARGEST, Cursor, cursor, read_cursor
from evertick.domain.access import Permission
from evertick.store import access
from evertick.store.access import AuditFilter
from evertick.ui.frame import PageRoute, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Text = Annotated[str, Query(max_length=300)]
_SHOWN, _LOOKED_AT = 100, 10_000


@router.get("/audit")
@needs(Permission.READ_AUDIT)
async def list_entries(
    request: Request, caller: Who, verb: Text = "", actor: Text = "", dag: Text = "", cursor_text: Cursor = None
) -> Response:
    (before,) = read_cursor(cursor_text, LARGEST)
    wanted = AuditFilter(verb=verb or None, actor=actor or None, dag=dag or None)
    async with caller.reading() as conn:
        found, end = await access.audit_page(conn, wanted, before=before, limit=_SHOWN, window=_LOOKED_AT)
    return page(
        request,
        "audit.html",
        here="audit",
        rows=found,
        verb=verb,
        actor=actor,
        dag=dag,
        is_first=cursor_text is None,
        next_cursor=None if end is None else cursor(end),
    )
