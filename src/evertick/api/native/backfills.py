"""Backfills: what one would do, creating, listing, pausing, resuming, canceling."""

from __future__ import annotations

import json
import secrets
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Caller, Who
from evertick.api.native.schedules import parsed
from evertick.api.paging import USUAL_ITEMS, Cursor, IdempotencyKey, Limit, Page, cursor, read_cursor
from evertick.db.notify import Channel
from evertick.db.queries import backfills, dags, shards
from evertick.db.queries.backfills import BackfillRow, FailedRun
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, UserError
from evertick.domain.schedules.preview import MOST_PARALLEL, Reprocess
from evertick.domain.schedules.spec import describe
from evertick.engine import backfills as verbs
from evertick.engine.backfills import BackfillPreview, BackfillRequest
from evertick.engine.fire_schedules import in_words

router = APIRouter(route_class=GuardedRoute, tags=["backfills"])

BackfillId = Annotated[int, Path(ge=1, le=2**31 - 1)]
_NEWEST = 2**31


class Backfill(BaseModel):
    backfill_id: int
    dag: str
    schedule: str | None
    when: str
    spec: dict[str, Any]
    params: dict[str, Any]
    first_at: datetime
    last_at: datetime
    reprocess: str
    newest_first: bool
    parallel: int
    state: str
    reason: str | None
    position: datetime | None
    total: int
    left_alone: int
    done: int
    made: int
    open_runs: int
    succeeded: int
    failed: int
    canceled: int
    remaining_seconds: float | None
    created_by: str
    created_at: datetime
    finished_at: datetime | None
    is_dag_paused: bool


class NewBackfill(BaseModel):
    """`schedule` names one of the DAG's, `when` is an expression, or the fields of a spec, instead. `is_preview` tells what it
    would do."""

    model_config = ConfigDict(extra="forbid")
    dag: Annotated[str, Field(max_length=250)]
    first: datetime
    last: datetime | None = None
    schedule: Annotated[str, Field(max_length=250)] | None = None
    when: Annotated[str, Field(max_length=1000)] | dict[str, Any] | None = None
    timezone: Annotated[str, Field(max_length=100)] | None = None
    reprocess: Reprocess = Reprocess.NONE
    newest_first: bool = False
    parallel: Annotated[int, Field(ge=1, le=MOST_PARALLEL)] = 1
    params: dict[str, Any] | None = None
    is_preview: bool = False


class Foreseen(BaseModel):
    """`backfill_id` is None for a preview. `existing`: instants that have a run, by its state."""

    backfill_id: int | None
    is_new: bool
    schedule: str | None
    when: str
    spec: dict[str, Any]
    first_at: datetime
    last_at: datetime
    total: int
    new_runs: int | None
    existing: dict[str, int] | None
    sample: list[datetime]


class BackfillPage(Backfill):
    """With the newest of its runs that failed."""

    failed_runs: list[FailedRun]


class CanceledBackfill(Backfill):
    """`canceled_runs`: how many were open and were ended with it."""

    canceled_runs: int


class CancelBackfill(BaseModel):
    model_config = ConfigDict(extra="forbid")
    leaves_runs: bool = False


@router.get("/backfills")
@requires(Permission.READ_BACKFILLS)
async def list_backfills(
    caller: Who,
    dag: Annotated[str | None, Query(max_length=250)] = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[Backfill]:
    """Newest first."""
    (before,) = read_cursor(cursor_text, _NEWEST)
    async with caller.reading() as conn:
        visible = await caller.visible(conn)
        found = await backfills.list_newest(conn, dag=dag, limit=limit, before=before, dag_ids=visible)
        now = await shards.read_clock(conn)
    next_cursor = cursor(found[-1].backfill_id) if len(found) == limit else None
    return Page(items=[backfill_of(row, now) for row in found], next_cursor=next_cursor)


@router.post("/backfills", status_code=201)
@requires(Permission.RUN_BACKFILLS)
async def create_backfill(
    wanted: NewBackfill, response: Response, caller: Who, idempotency_key: IdempotencyKey = None
) -> Foreseen:
    """Make runs for the instants of a range that have none. The same Idempotency-Key again is the same backfill."""
    wish = _wish(wanted)
    async with caller.changing(Channel.PLAN) as conn:
        await caller.dag(conn, wanted.dag)
        if wanted.is_preview:
            response.status_code = 200
            return _foreseen(None, False, await verbs.preview(conn, wish), wish)
        request = idempotency_key or f"api-{secrets.token_hex(8)}"
        made, outlook = await verbs.create(conn, wish, request=request, actor=caller.actor)
    response.status_code = 201 if made.is_new else 200
    return _foreseen(made.id, made.is_new, outlook, wish)


@router.get("/backfills/{backfill_id}")
@requires(Permission.READ_BACKFILLS)
async def show_backfill(backfill_id: BackfillId, caller: Who) -> BackfillPage:
    async with caller.reading() as conn:
        row = await find_backfill(caller, conn, backfill_id)
        failed = await backfills.failed_runs(conn, backfill_id=backfill_id)
        facts = backfill_of(row, await shards.read_clock(conn)).model_dump()
    return BackfillPage(**facts, failed_runs=failed)


@router.post("/backfills/{backfill_id}/pause")
@requires(Permission.RUN_BACKFILLS)
async def pause_backfill(backfill_id: BackfillId, caller: Who) -> Backfill:
    async with caller.changing() as conn:
        await find_backfill(caller, conn, backfill_id)
        row = await verbs.pause(conn, backfill_id=backfill_id, actor=caller.actor)
        return backfill_of(row, await shards.read_clock(conn))


@router.post("/backfills/{backfill_id}/resume")
@requires(Permission.RUN_BACKFILLS)
async def resume_backfill(backfill_id: BackfillId, caller: Who) -> Backfill:
    async with caller.changing(Channel.PLAN) as conn:
        await find_backfill(caller, conn, backfill_id)
        row = await verbs.resume(conn, backfill_id=backfill_id, actor=caller.actor)
        return backfill_of(row, await shards.read_clock(conn))


@router.post("/backfills/{backfill_id}/cancel")
@requires(Permission.RUN_BACKFILLS)
async def cancel_backfill(backfill_id: BackfillId, caller: Who, how: CancelBackfill | None = None) -> CanceledBackfill:
    """No more runs are made, and the open ones are canceled unless they are left."""
    async with caller.changing(Channel.STOP, Channel.READY) as conn:
        await find_backfill(caller, conn, backfill_id)
        leaves = how.leaves_runs if how else False
        done = await verbs.cancel(conn, backfill_id=backfill_id, leaves_runs=leaves, actor=caller.actor)
        row = await verbs.find_backfill(conn, backfill_id)
        facts = backfill_of(row, await shards.read_clock(conn)).model_dump()
    return CanceledBackfill(**facts, canceled_runs=done.runs or 0)


async def find_backfill(caller: Caller, conn: AsyncConnection, backfill_id: int) -> BackfillRow:
    row = await backfills.find(conn, backfill_id)
    if row is not None and caller.principal.tags is not None:
        dag = await dags.find(conn, row.dag)
        row = row if dag is not None and caller.sees(dag) else None
    if row is None:
        raise NotFound(f"There is no backfill {backfill_id}.")
    return row


def backfill_of(row: BackfillRow, now: datetime) -> Backfill:
    same = {
        name: getattr(row, name) for name in Backfill.model_fields if hasattr(row, name) and name != "remaining_seconds"
    }
    return Backfill(**same, when=in_words(row.spec), remaining_seconds=row.remaining_seconds(now))


def _wish(wanted: NewBackfill) -> BackfillRequest:
    if any(each is not None and each.tzinfo is None for each in (wanted.first, wanted.last)):
        raise UserError("Give instants with an offset, as 2030-01-01T00:00:00Z.")
    if wanted.when is not None and wanted.schedule is not None:
        raise UserError("`schedule` and `when` each say which instants are meant: give one of them.")
    return BackfillRequest(
        dag=wanted.dag,
        first=wanted.first,
        last=wanted.last,
        schedule=wanted.schedule,
        spec=None if wanted.when is None else parsed(wanted.when, {"timezone": wanted.timezone}),
        reprocess=wanted.reprocess,
        newest_first=wanted.newest_first,
        parallel=wanted.parallel,
        params=wanted.params,
    )


def _foreseen(backfill_id: int | None, is_new: bool, outlook: BackfillPreview, wish: BackfillRequest) -> Foreseen:
    return Foreseen(
        backfill_id=backfill_id,
        is_new=is_new,
        schedule=outlook.schedule,
        when=describe(outlook.spec),
        spec=json.loads(outlook.spec.to_json()),
        first_at=outlook.first,
        last_at=outlook.last,
        total=outlook.total,
        new_runs=outlook.new_runs(wish.reprocess),
        existing=None if outlook.existing is None else dict(outlook.existing),
        sample=list(outlook.sample),
    )
