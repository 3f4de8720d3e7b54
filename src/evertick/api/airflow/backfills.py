"""Backfills."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.exceptions import HTTPException

from evertick.api.airflow.models import (
    BackfillCollectionResponse,
    BackfillResponse,
    DryRunBackfillCollectionResponse,
)
from evertick.api.airflow.query import USUAL_ITEMS, Body, Limit, Offset, OrderBy, ordered, page_size
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.db.queries import backfills
from evertick.db.queries.backfills import BackfillRow
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict
from evertick.domain.schedules.preview import MOST_PARALLEL, Reprocess
from evertick.domain.schedules.time_zones import with_zone
from evertick.engine import backfills as verbs
from evertick.engine.backfills import BackfillRequest
from evertick.operations.backfills import find_backfill

router = APIRouter(route_class=GuardedRoute, tags=["Backfill"])

# Only this many backfills are sorted. Users create backfills by hand, so there are few.
MOST_BACKFILLS = 5000
MOST_FORESEEN = 5000
# The number of newest backfills of a DAG to search for an active one.
_LOOKED_AT = 100
BackfillId = Annotated[int, Path(ge=1, le=2**31 - 1)]
_REPROCESS = {"none": Reprocess.NONE, "failed": Reprocess.FAILED, "completed": Reprocess.ALL}
_KEYS = {
    "id": lambda row: row.backfill_id,
    "dag_id": lambda row: row.dag,
    "from_date": lambda row: row.first_at,
    "to_date": lambda row: row.last_at,
    "created_at": lambda row: row.created_at,
    "completed_at": lambda row: row.finished_at,
}


class BackfillBody(Body):
    dag_id: Annotated[str, Field(max_length=250)]
    from_date: datetime
    to_date: datetime
    run_backwards: bool = False
    dag_run_conf: dict[str, Any] | None = None
    reprocess_behavior: Literal["none", "failed", "completed"] | None = None
    max_active_runs: Annotated[int, Field(ge=1, le=MOST_PARALLEL)] = 10
    run_on_latest_version: bool | None = None


@router.get("/backfills", response_model=BackfillCollectionResponse)
@requires(Permission.READ_BACKFILLS)
async def list_backfills(
    caller: Who,
    dag_id: Annotated[str | None, Query(max_length=250)] = None,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        rows = await backfills.list_newest(conn, dag=dag_id, limit=MOST_BACKFILLS, dag_ids=visible)
    found = ordered(rows, order_by or ["id"], _KEYS)
    part = found[offset : offset + page_size(limit)]
    return {"backfills": [_document(row) for row in part], "total_entries": len(found)}


@router.post("/backfills", response_model=BackfillResponse)
@requires(Permission.RUN_BACKFILLS)
async def create_backfill(body: BackfillBody, caller: Who) -> dict[str, Any]:
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, body.dag_id)
        # As in Airflow: one active backfill per DAG, checked before other errors. The native API has no such limit.
        if any(row.finished_at is None for row in await backfills.list_newest(conn, dag=body.dag_id, limit=_LOOKED_AT)):
            raise Conflict(f"There is another running backfill for dag {body.dag_id}")
        request = f"api-{secrets.token_hex(8)}"
        made, _ = await verbs.create(conn, _wish(body), request=request, actor=caller.actor)
        return _document(await verbs.find_backfill(conn, made.id))


@router.post("/backfills/dry_run", response_model=DryRunBackfillCollectionResponse)
@requires(Permission.RUN_BACKFILLS)
async def create_backfill_dry_run(body: BackfillBody, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        await caller.dag(conn, body.dag_id)
        instants, total = await verbs.instants_of(conn, _wish(body), limit=MOST_FORESEEN)
    found = [{"logical_date": each, "partition_key": None, "partition_date": None} for each in instants]
    return {"backfills": found, "total_entries": total}


@router.get("/backfills/{backfill_id}", response_model=BackfillResponse)
@requires(Permission.READ_BACKFILLS)
async def get_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return _document(await find_backfill(caller, conn, backfill_id))


@router.put("/backfills/{backfill_id}/pause", response_model=BackfillResponse)
@requires(Permission.RUN_BACKFILLS)
async def pause_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    async with caller.write() as conn:
        await find_backfill(caller, conn, backfill_id)
        return _document(await verbs.pause(conn, backfill_id=backfill_id, actor=caller.actor))


@router.put("/backfills/{backfill_id}/unpause", response_model=BackfillResponse)
@requires(Permission.RUN_BACKFILLS)
async def unpause_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_backfill(caller, conn, backfill_id)
        return _document(await verbs.resume(conn, backfill_id=backfill_id, actor=caller.actor))


@router.put("/backfills/{backfill_id}/cancel", response_model=BackfillResponse)
@requires(Permission.RUN_BACKFILLS)
async def cancel_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    async with caller.write(Channel.STOP, Channel.TASKS) as conn:
        await find_backfill(caller, conn, backfill_id)
        await verbs.cancel(conn, backfill_id=backfill_id, leaves_runs=False, actor=caller.actor)
        return _document(await verbs.find_backfill(conn, backfill_id))


def _wish(body: BackfillBody) -> BackfillRequest:
    if with_zone(body.to_date) < with_zone(body.from_date):
        # The same status as in Airflow.
        raise HTTPException(422, f"to_date {body.to_date} is before from_date {body.from_date}: swap them.")
    return BackfillRequest(
        dag=body.dag_id,
        first=with_zone(body.from_date),
        last=with_zone(body.to_date),
        reprocess=_REPROCESS[body.reprocess_behavior or "none"],
        newest_first=body.run_backwards,
        parallel=body.max_active_runs,
        params=body.dag_run_conf,
    )


def _document(row: BackfillRow) -> dict[str, Any]:
    behaviour = next(name for name, ours in _REPROCESS.items() if ours == row.reprocess)
    return {
        "id": row.backfill_id,
        "dag_id": row.dag,
        "dag_display_name": row.dag,
        "from_date": row.first_at,
        "to_date": row.last_at,
        "dag_run_conf": row.params,
        "is_paused": row.state == "paused",
        "reprocess_behavior": behaviour,
        "max_active_runs": row.parallel,
        "created_at": row.created_at,
        "completed_at": row.finished_at,
        "updated_at": row.finished_at or row.created_at,
    }
