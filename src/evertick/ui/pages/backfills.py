"""Backfills: the form with a preview, the list and the progress of each backfill."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from evertick.api.auth import requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.db.queries import backfills, schedules, shards
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError, UserError
from evertick.domain.schedules.preview import MOST_PARALLEL, Reprocess
from evertick.domain.schedules.spec import describe, parse_schedule
from evertick.engine import backfills as verbs
from evertick.engine.backfills import BackfillRequest
from evertick.operations.backfills import BackfillId, backfill_of, find_backfill
from evertick.operations.paging import Cursor, encode_cursor, read_cursor
from evertick.ui.layout import PageRoute, done, form_of, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_NEWEST, _SHOWN, _MOST_SCHEDULES = 2**31, 50, 200
DagName = Annotated[str, Query(max_length=250)]


@router.get("/backfills")
@requires(Permission.READ_BACKFILLS)
async def list_backfills(request: Request, caller: Who, dag: DagName = "", cursor: Cursor = None) -> Response:
    (before,) = read_cursor(cursor, _NEWEST)
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        found = await backfills.list_newest(conn, dag=dag or None, limit=_SHOWN, before=before, dag_ids=visible)
        now = await shards.read_clock(conn)
    rows = [backfill_of(row, now) for row in found]
    is_more = len(found) == _SHOWN
    next_cursor = encode_cursor(found[-1].backfill_id) if is_more else None
    return page(request, "backfills.html", here="backfills", rows=rows, dag=dag, next_cursor=next_cursor)


@router.get("/backfills/new")
@requires(Permission.RUN_BACKFILLS)
async def new_backfill(request: Request, caller: Who, dag: DagName = "") -> Response:
    async with caller.read() as conn:
        found = []
        if dag:
            await caller.dag(conn, dag)
            found = await schedules.list_all(conn, dag=dag, limit=_MOST_SCHEDULES)
    return page(
        request,
        "backfill_new.html",
        here="backfills",
        dag=dag,
        schedules=found,
        most=MOST_PARALLEL,
        ways=list(Reprocess),
    )


@router.post("/backfills/preview")
@requires(Permission.RUN_BACKFILLS)
async def preview_backfill(request: Request, caller: Who) -> Response:
    """Preview the backfill as a fragment of the form. Invalid input is reported in the same place."""
    form = await form_of(request)
    if not form.get("first"):
        return page(request, "backfill_preview.html", problem=None, outlook=None, new_runs=None, when="")
    try:
        wish = _wish(form)
        async with caller.read() as conn:
            await caller.dag(conn, wish.dag)
            outlook = await verbs.preview(conn, wish)
    except EvertickError as error:
        return page(request, "backfill_preview.html", problem=str(error), outlook=None, new_runs=None, when="")
    return page(
        request,
        "backfill_preview.html",
        problem=None,
        outlook=outlook,
        new_runs=outlook.new_runs(wish.reprocess),
        when=describe(outlook.spec),
    )


@router.post("/backfills")
@requires(Permission.RUN_BACKFILLS)
async def create_backfill(request: Request, caller: Who) -> Response:
    form = await form_of(request)
    wish = _wish(form)
    request_key = form.get("request") or f"ui-{secrets.token_hex(8)}"
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, wish.dag)
        made, _ = await verbs.create(conn, wish, request=request_key[:200], actor=caller.actor)
    return done(f"Backfill {made.id} of {wish.dag} created.", go=f"/backfills/{made.id}")


@router.get("/backfills/{backfill_id}")
@requires(Permission.READ_BACKFILLS)
async def show_backfill(backfill_id: BackfillId, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        row = await find_backfill(caller, conn, backfill_id)
        failed = await backfills.failed_runs(conn, backfill_id=backfill_id)
        now = await shards.read_clock(conn)
    shown = backfill_of(row, now)
    is_open = row.state in ("running", "paused")
    return page(request, "backfill.html", here="backfills", row=shown, failed=failed, is_open=is_open)


@router.post("/backfills/{backfill_id}/pause")
@requires(Permission.RUN_BACKFILLS)
async def pause_backfill(backfill_id: BackfillId, caller: Who) -> Response:
    async with caller.write() as conn:
        await find_backfill(caller, conn, backfill_id)
        await verbs.pause(conn, backfill_id=backfill_id, actor=caller.actor)
    return done(f"Backfill {backfill_id} paused: it creates no new runs until it is resumed.")


@router.post("/backfills/{backfill_id}/resume")
@requires(Permission.RUN_BACKFILLS)
async def resume_backfill(backfill_id: BackfillId, caller: Who) -> Response:
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_backfill(caller, conn, backfill_id)
        await verbs.resume(conn, backfill_id=backfill_id, actor=caller.actor)
    return done(f"Backfill {backfill_id} resumed.")


@router.post("/backfills/{backfill_id}/cancel")
@requires(Permission.RUN_BACKFILLS)
async def cancel_backfill(backfill_id: BackfillId, request: Request, caller: Who) -> Response:
    leaves = (await form_of(request)).get("leaves_runs") == "true"
    async with caller.write(Channel.STOP, Channel.TASKS) as conn:
        await find_backfill(caller, conn, backfill_id)
        await verbs.cancel(conn, backfill_id=backfill_id, leaves_runs=leaves, actor=caller.actor)
    return done(
        f"Backfill {backfill_id} canceled{'; its open runs continue' if leaves else ', including its open runs'}."
    )


def _wish(form: Mapping[str, str]) -> BackfillRequest:
    when, schedule = form.get("when", "").strip(), form.get("schedule", "").strip()
    try:
        parallel = int(form.get("parallel", "1"))
        reprocess = Reprocess(form.get("reprocess", "none"))
    except ValueError:
        raise UserError(
            "Invalid form: parallel runs must be a whole number, and reprocessing one of the listed choices."
        ) from None
    return BackfillRequest(
        dag=form.get("dag", "").strip(),
        first=_instant(form.get("first", ""), "From"),
        last=_instant(form["last"], "To") if form.get("last") else None,
        schedule=None if when else schedule or None,
        spec=parse_schedule(when) if when else None,
        reprocess=reprocess,
        newest_first=form.get("newest_first") == "true",
        parallel=parallel,
        params=_params(form.get("params", "")),
    )


def _instant(text: str, what: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"{what}: enter a time in UTC, for example 2030-01-31T08:00.") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _params(text: str) -> dict[str, Any] | None:
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError('Params: enter a JSON object, for example {"rows": 10}, or leave the field empty.')
    return found
