"""Backfills: preview, create, list, show, pause, unpause and cancel."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import backfills, shards
from evertick.db.queries.backfills import BackfillRow, FailedRun
from evertick.domain.errors import NotFound, UserError
from evertick.domain.schedules.partitions import LONGEST_KEY
from evertick.domain.schedules.preview import MOST_PARALLEL, Reprocess
from evertick.domain.schedules.spec import describe
from evertick.engine import backfills as verbs
from evertick.engine.backfills import BackfillPlan, BackfillRequest
from evertick.engine.fire_schedules import in_words, spec_json
from evertick.operations.caller import Caller
from evertick.operations.dags import LONGEST_NAME
from evertick.operations.paging import (
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    Limit,
    Page,
    RequestBody,
    aware,
    page_of,
    read_cursor,
    record_of,
)
from evertick.operations.schedules import parsed

BackfillId = Annotated[int, Ge(1), Le(2**31 - 1), Doc("The backfill's number.")]
_NEWEST = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBackfill(RequestBody):
    """The instants are those of `schedule`, one of the DAG's schedules, or of `when`, an expression or the fields of a spec.
    `is_preview` counts them and creates nothing. `partitions`: the keys of those that get a run, instead of a range from `first`
    to `last`, which are dates of partitions if the schedule has them."""

    dag: Annotated[str, MaxLen(LONGEST_NAME)]
    first: datetime | None = None
    last: datetime | None = None
    schedule: Annotated[str, MaxLen(LONGEST_NAME)] | None = None
    when: Annotated[str, MaxLen(1000)] | dict[str, Any] | None = None
    timezone: Annotated[str, MaxLen(100)] | None = None
    reprocess: Reprocess = Reprocess.NONE
    newest_first: bool = False
    parallel: Annotated[int, Ge(1), Le(MOST_PARALLEL)] = 1
    params: dict[str, Any] | None = None
    partitions: Annotated[list[Annotated[str, MaxLen(LONGEST_KEY)]], MaxLen(verbs.MOST_KEYED)] = field(
        default_factory=list
    )
    is_preview: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPreview:
    """`backfill_id` is None for a preview. `existing`: the number of instants with a run, by the state of the run."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillDetails(Backfill):
    """A backfill with the newest of its failed runs."""

    failed_runs: list[FailedRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanceledBackfill(Backfill):
    """`canceled_runs`: the number of open runs that were canceled with it."""

    canceled_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelBackfillRequest(RequestBody):
    leaves_runs: bool = False


async def list_backfills(
    caller: Caller,
    *,
    dag: Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only backfills of this DAG.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Backfill]:
    """List backfills, newest first."""
    (before,) = read_cursor(cursor, _NEWEST)
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        found = await backfills.list_newest(conn, dag=dag, limit=limit, before=before, dag_ids=visible)
        now = await shards.read_clock(conn)
    return page_of(found, limit, lambda row: (row.backfill_id,), lambda row: backfill_of(row, now))


async def create_backfill(
    caller: Caller, *, body: NewBackfill, idempotency_key: IdempotencyKey = None
) -> BackfillPreview:
    """Create runs for the instants of a range that have none. A request that repeats an Idempotency-Key returns the same
    backfill with status 200 instead of 201."""
    wish = _wish(body)
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, body.dag)
        if body.is_preview:
            return _planned(None, False, await verbs.preview(conn, wish), wish)
        request = idempotency_key or f"api-{secrets.token_hex(8)}"
        made, outlook = await verbs.create(conn, wish, request=request, actor=caller.actor)
    return _planned(made.id, made.is_new, outlook, wish)


async def show_backfill(caller: Caller, *, backfill_id: BackfillId) -> BackfillDetails:
    """Show one backfill with its progress and its failed runs."""
    async with caller.read() as conn:
        row = await find_backfill(caller, conn, backfill_id)
        failed = await backfills.failed_runs(conn, backfill_id=backfill_id)
        found = backfill_of(row, await shards.read_clock(conn))
    return record_of(BackfillDetails, found, failed_runs=failed)


async def pause_backfill(caller: Caller, *, backfill_id: BackfillId) -> Backfill:
    """Pause a backfill: it creates no more runs. Its open runs continue."""
    async with caller.write() as conn:
        await find_backfill(caller, conn, backfill_id)
        row = await verbs.pause(conn, backfill_id=backfill_id, actor=caller.actor)
        return backfill_of(row, await shards.read_clock(conn))


async def unpause_backfill(caller: Caller, *, backfill_id: BackfillId) -> Backfill:
    """Resume a paused backfill."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_backfill(caller, conn, backfill_id)
        row = await verbs.unpause(conn, backfill_id=backfill_id, actor=caller.actor)
        return backfill_of(row, await shards.read_clock(conn))


async def cancel_backfill(
    caller: Caller, *, backfill_id: BackfillId, body: CancelBackfillRequest | None = None
) -> CanceledBackfill:
    """Cancel a backfill: it creates no more runs, and its open runs are canceled unless `leaves_runs` is set."""
    async with caller.write(Channel.STOP, Channel.TASKS) as conn:
        await find_backfill(caller, conn, backfill_id)
        leaves = body.leaves_runs if body else False
        done = await verbs.cancel(conn, backfill_id=backfill_id, leaves_runs=leaves, actor=caller.actor)
        row = await verbs.find_backfill(conn, backfill_id)
        found = backfill_of(row, await shards.read_clock(conn))
    return record_of(CanceledBackfill, found, canceled_runs=done.runs or 0)


async def find_backfill(caller: Caller, conn: AsyncConnection, backfill_id: int) -> BackfillRow:
    """A backfill of a DAG that the caller may see; the DAG may be deleted by now."""
    row = await backfills.find(conn, backfill_id)
    if row is None or not await caller.sees_dag(conn, row.dag):
        raise NotFound(f"There is no backfill {backfill_id}. List backfills with `evertick backfills list`.")
    return row


def backfill_of(row: BackfillRow, now: datetime) -> Backfill:
    return record_of(Backfill, row, when=in_words(row.spec), remaining_seconds=row.remaining_seconds(now))


def _wish(wanted: NewBackfill) -> BackfillRequest:
    if wanted.when is not None and wanted.schedule is not None:
        raise UserError("`schedule` and `when` both select the instants: give one of them.")
    if (wanted.first is None) != bool(wanted.partitions) or (wanted.partitions and (wanted.last or wanted.when)):
        raise UserError("A backfill has a range that begins with `first`, or a list of `partitions`: give one of them.")
    last = None if wanted.last is None else aware(wanted.last)
    spec = None if wanted.when is None else parsed(wanted.when, {"timezone": wanted.timezone})
    first = datetime.now(UTC) if wanted.first is None else aware(wanted.first)  # of no range: replaced by the preview
    return record_of(
        BackfillRequest,
        wanted,
        first=first,
        last=last,
        spec=spec,
        partitions=tuple(wanted.partitions),
        accepts_unknown=False,
    )


def _planned(backfill_id: int | None, is_new: bool, outlook: BackfillPlan, wish: BackfillRequest) -> BackfillPreview:
    return BackfillPreview(
        backfill_id=backfill_id,
        is_new=is_new,
        schedule=outlook.schedule,
        when=describe(outlook.spec),
        spec=spec_json(outlook.spec),
        first_at=outlook.first,
        last_at=outlook.last,
        total=outlook.total,
        new_runs=outlook.new_runs(wish.reprocess),
        existing=None if outlook.existing is None else dict(outlook.existing),
        sample=list(outlook.sample),
    )
