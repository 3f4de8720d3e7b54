"""Runs of all DAGs, newest first."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.native.runs import WINDOW
from evertick.api.paging import LARGEST, Cursor, cursor, read_cursor
from evertick.domain.access import Permission
from evertick.domain.states import RunState
from evertick.store import runs
from evertick.ui.frame import PageRoute, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 50


@router.get("/runs")
@needs(Permission.READ_RUNS)
async def list_runs(
    request: Request,
    caller: Who,
    dag: Annotated[str, Query(max_length=250)] = "",
    state: Annotated[str, Query(max_length=20)] = "",
    cursor_text: Cursor = None,
) -> Response:
    (before,) = read_cursor(cursor_text, LARGEST)
    wanted = RunState(state) if state in set(RunState) else None
    async with caller.reading() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag else await caller.visible(conn)
        found, end = await runs.page(conn, before=before, dag_ids=dag_ids, state=wanted, limit=_SHOWN, window=WINDOW)
    return page(
        request,
        "runs.html",
        here="runs",
        rows=found,
        dag=dag,
        state_filter=wanted,
        states=list(RunState),
        is_first=cursor_text is None,
        next_cursor=None if end is None else cursor(end),
    )
