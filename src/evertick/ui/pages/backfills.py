"""Backfills: the form with a preview, the list and the progress of each backfill."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Query, Request, Response
from psycopg import AsyncConnection

from evertick.api.context import ApiCaller, Who
from evertick.db.notify import Channel
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError, UserError
from evertick.domain.schedules.preview import MOST_PARALLEL, Reprocess
from evertick.domain.schedules.spec import describe, parse_schedule
from evertick.engine import backfills as verbs
from evertick.engine.backfills import BackfillRequest
from evertick.operations import backfills as operations
from evertick.operations.backfills import BackfillId, CancelBackfillRequest
from evertick.operations.paging import Cursor
from evertick.ui.layout import Form, done, page, page_router, read_moment
from evertick.ui.pages.dag import only_zone, zones_of

router = page_router()

DagName = Annotated[str, Query(max_length=250)]


@router.get("/backfills", Permission.READ_BACKFILLS)
async def list_backfills(request: Request, caller: Who, dag: DagName = "", cursor: Cursor = None) -> Response:
    found = await operations.list_backfills(caller, dag=dag or None, cursor=cursor)
    rows, next_cursor = found.items, found.next_cursor
    return page(request, "backfills.html", here="backfills", rows=rows, dag=dag, next_cursor=next_cursor)


@router.get("/backfills/new", Permission.RUN_BACKFILLS)
async def new_backfill(request: Request, caller: Who, dag: DagName = "") -> Response:
    async with caller.read() as conn:
        zones = {}
        if dag:
            await caller.dag(conn, dag)
            zones = await zones_of(conn, dag)
    return page(
        request,
        "backfill_new.html",
        here="backfills",
        dag=dag,
        zones=zones,
        zone=only_zone(zones),
        most=MOST_PARALLEL,
        ways=list(Reprocess),
    )


@router.post("/backfills/preview", Permission.RUN_BACKFILLS)
async def preview_backfill(request: Request, form: Form, caller: Who) -> Response:
    """Preview the backfill as a fragment of the form. Invalid input is reported in the same place."""
    shown: dict[str, Any] = {"problem": None, "outlook": None, "new_runs": None, "when": ""}
    if form.get("first"):
        try:
            async with caller.read() as conn:
                wish = await _wish(caller, conn, form)
                outlook = await verbs.preview(conn, wish)
            new_runs, when = outlook.new_runs(wish.reprocess), describe(outlook.spec)
            shown |= {"outlook": outlook, "new_runs": new_runs, "when": when}
        except EvertickError as error:
            shown["problem"] = str(error)
    return page(request, "backfill_preview.html", **shown)


@router.post("/backfills", Permission.RUN_BACKFILLS)
async def create_backfill(request: Request, form: Form, caller: Who) -> Response:
    request_key = form.get("request") or f"ui-{secrets.token_hex(8)}"
    async with caller.write(Channel.SCHEDULE) as conn:
        wish = await _wish(caller, conn, form)
        made, _ = await verbs.create(conn, wish, request=request_key[:200], actor=caller.actor)
    return done(f"Backfill {made.id} of {wish.dag} created.", go=f"/backfills/{made.id}")


@router.get("/backfills/{backfill_id}", Permission.READ_BACKFILLS)
async def show_backfill(backfill_id: BackfillId, request: Request, caller: Who) -> Response:
    row = await operations.show_backfill(caller, backfill_id=backfill_id)
    return page(request, "backfill.html", here="backfills", row=row, is_open=row.state in ("running", "paused"))


@router.post("/backfills/{backfill_id}/pause", Permission.RUN_BACKFILLS)
async def pause_backfill(backfill_id: BackfillId, caller: Who) -> Response:
    await operations.pause_backfill(caller, backfill_id=backfill_id)
    return done(f"Backfill {backfill_id} paused: it creates no new runs until it is resumed.")


@router.post("/backfills/{backfill_id}/resume", Permission.RUN_BACKFILLS)
async def resume_backfill(backfill_id: BackfillId, caller: Who) -> Response:
    await operations.unpause_backfill(caller, backfill_id=backfill_id)
    return done(f"Backfill {backfill_id} resumed.")


@router.post("/backfills/{backfill_id}/cancel", Permission.RUN_BACKFILLS)
async def cancel_backfill(backfill_id: BackfillId, form: Form, caller: Who) -> Response:
    leaves = form.get("leaves_runs") == "true"
    await operations.cancel_backfill(caller, backfill_id=backfill_id, body=CancelBackfillRequest(leaves_runs=leaves))
    return done(
        f"Backfill {backfill_id} canceled{'; its open runs continue' if leaves else ', including its open runs'}."
    )


async def _wish(caller: ApiCaller, conn: AsyncConnection, form: Mapping[str, str]) -> BackfillRequest:
    """Times are on the clock of the chosen schedule. An expression has the clock of the DAG's only schedule."""
    dag = form.get("dag", "").strip()
    await caller.dag(conn, dag)
    zones = await zones_of(conn, dag)
    when, schedule = form.get("when", "").strip(), form.get("schedule", "").strip()
    try:
        parallel = int(form.get("parallel", "1"))
        reprocess = Reprocess(form.get("reprocess", "none"))
    except ValueError:
        raise UserError(
            "Invalid form: parallel runs must be a whole number, and reprocessing one of the listed choices."
        ) from None
    zone = only_zone(zones) if when else zones.get(schedule, only_zone(zones))
    return BackfillRequest(
        dag=dag,
        first=read_moment(form.get("first", ""), "From", zone),
        last=read_moment(form["last"], "To", zone) if form.get("last") else None,
        schedule=None if when else schedule or None,
        spec=parse_schedule(when, timezone=zone) if when else None,
        reprocess=reprocess,
        newest_first=form.get("newest_first") == "true",
        parallel=parallel,
        params=_params(form.get("params", "")),
    )


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
