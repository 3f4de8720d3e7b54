"""Backfills."""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import Field
from starlette.exceptions import HTTPException

from evertick.api.airflow import models, query
from evertick.api.auth import GuardedRouter
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
from evertick.operations import backfills as operations
from evertick.operations.backfills import Backfill, find_backfill

router = GuardedRouter(tags=["Backfill"])

# Only this many backfills are sorted. Users create backfills by hand, so there are few.
MOST_BACKFILLS = 5000
MOST_FORESEEN = 5000
# The number of newest backfills of a DAG to search for an active one.
_LOOKED_AT = 100
BackfillId = Annotated[int, Path(ge=1, le=2**31 - 1)]
_REPROCESS = {"none": Reprocess.NONE, "failed": Reprocess.FAILED, "completed": Reprocess.ALL}
_KEYS = {
    "id": "backfill_id",
    "dag_id": "dag",
    "from_date": "first_at",
    "to_date": "last_at",
    "created_at": "created_at",
    "completed_at": "finished_at",
}


class BackfillBody(query.Body):
    dag_id: Annotated[str, Field(max_length=250)]
    from_date: datetime
    to_date: datetime
    run_backwards: bool = False
    dag_run_conf: dict[str, Any] | None = None
    reprocess_behavior: Literal["none", "failed", "completed"] | None = None
    max_active_runs: Annotated[int, Field(ge=1, le=MOST_PARALLEL)] = 10
    run_on_latest_version: bool | None = None


@router.get("/backfills", Permission.READ_BACKFILLS, models.BackfillCollectionResponse)
async def list_backfills(
    caller: Who,
    dag_id: Annotated[str | None, Query(max_length=250)] = None,
    limit: query.Limit = query.USUAL_ITEMS,
    offset: query.Offset = 0,
    order_by: query.OrderBy = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        rows = await backfills.list_newest(conn, dag=dag_id, limit=MOST_BACKFILLS, dag_ids=visible)
    part = query.ordered(rows, order_by or ["id"], _KEYS)[offset : offset + query.page_size(limit)]
    return {"backfills": [_document(row) for row in part], "total_entries": len(rows)}


@router.post("/backfills", Permission.RUN_BACKFILLS, models.BackfillResponse)
async def create_backfill(body: BackfillBody, caller: Who) -> dict[str, Any]:
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, body.dag_id)
        # As in Airflow: one active backfill per DAG, checked before other errors. The native API has no such limit.
        if any(row.finished_at is None for row in await backfills.list_newest(conn, dag=body.dag_id, limit=_LOOKED_AT)):
            raise Conflict(f"There is another running backfill for dag {body.dag_id}")
        request = f"api-{secrets.token_hex(8)}"
        made, _ = await verbs.create(conn, _wish(body), request=request, actor=caller.actor)
        return _document(await verbs.find_backfill(conn, made.id))


@router.post("/backfills/dry_run", Permission.RUN_BACKFILLS, models.DryRunBackfillCollectionResponse)
async def create_backfill_dry_run(body: BackfillBody, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        await caller.dag(conn, body.dag_id)
        instants, total = await verbs.instants_of(conn, _wish(body), limit=MOST_FORESEEN)
    found = [
        {
            "logical_date": each if partition is None else None,
            "partition_key": None if partition is None else partition.key,
            "partition_date": None if partition is None else partition.date,
        }
        for each, partition in instants
    ]
    return {"backfills": found, "total_entries": total}


@router.get("/backfills/{backfill_id}", Permission.READ_BACKFILLS, models.BackfillResponse)
async def get_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return _document(await find_backfill(caller, conn, backfill_id))


@router.put("/backfills/{backfill_id}/pause", Permission.RUN_BACKFILLS, models.BackfillResponse)
async def pause_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    return _document(await operations.pause_backfill(caller, backfill_id=backfill_id))


@router.put("/backfills/{backfill_id}/unpause", Permission.RUN_BACKFILLS, models.BackfillResponse)
async def unpause_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    return _document(await operations.unpause_backfill(caller, backfill_id=backfill_id))


@router.put("/backfills/{backfill_id}/cancel", Permission.RUN_BACKFILLS, models.BackfillResponse)
async def cancel_backfill(backfill_id: BackfillId, caller: Who) -> dict[str, Any]:
    return _document(await operations.cancel_backfill(caller, backfill_id=backfill_id))


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
        accepts_unknown=True,
    )


def _document(row: BackfillRow | Backfill) -> dict[str, Any]:
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
