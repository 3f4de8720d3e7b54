"""What tasks and DAGs wait for from outside: events, approvals, and updates of assets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, cast

from annotated_doc import Doc
from annotated_types import MaxLen

from evertick.db.notify import Channel
from evertick.db.queries import assets, waits
from evertick.db.queries.assets import Asset, AssetPartition
from evertick.db.queries.waits import ApprovalRow, EventRow
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.waits import check_event_name
from evertick.domain.errors import UserError
from evertick.domain.schedules.partitions import LONGEST_KEY
from evertick.engine import waits as verbs
from evertick.engine.waits import LONGEST_NOTE, AssetEvent, Decision, SentEvent, find_approval, find_asset, update_asset
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    LARGEST,
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    Limit,
    Page,
    RequestBody,
    page_of,
    read_cursor,
    record_of,
    short_page,
)
from evertick.operations.runs import RunId, find_run
from evertick.operations.tasks import MapIndex, TaskName, small

EventName = Annotated[str, MaxLen(1000), Doc("The event's name, as tasks wait for it.")]
AssetName = Annotated[str, MaxLen(1000), Doc("The asset's name, as in the DAG.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRequest(RequestBody):
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetUpdate(RequestBody):
    """`extra` is stored with the update. `partition`: the key of the one that was updated, of an asset with partitions."""

    extra: dict[str, Any] = field(default_factory=dict)
    partition: Annotated[str, MaxLen(LONGEST_KEY)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A request for approval. `form` has its fields, declared like the parameters of a DAG. `is_open`: the task still
    waits for the decision. A question of a running task has a `body`, `options` of which one or, with `is_multiple`,
    several are `chosen`, and maybe `users` who alone may answer."""

    run_id: int
    task_index: int
    map_index: int
    epoch: int
    dag: str
    task: str
    title: str
    form: list[dict[str, Any]]
    approvers: str | None
    asked_at: datetime
    deadline: datetime | None
    is_open: bool
    is_approved: bool | None
    decided_by: str | None
    decided_at: datetime | None
    note: str | None
    fields: dict[str, Any] | None
    chosen: list[str] | None
    body: str | None
    options: list[str] | None
    is_multiple: bool
    users: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalDecision(RequestBody):
    """`chosen`: some of the options, if there are options."""

    is_approved: bool
    note: Annotated[str, MaxLen(LONGEST_NOTE)] | None = None
    chosen: Annotated[list[str], MaxLen(1000)] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


# Approvals ------------------------------------------------------------------------------------------------------------


async def list_approvals(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Approval]:
    """List the approvals that tasks wait for, oldest first."""
    asked, run_id, idx, map_index = cast("tuple[str, int, int, int]", read_cursor(cursor, "-infinity", 0, -1, -2))
    async with caller.read() as conn:
        found = await waits.list_approvals(
            conn,
            dag_ids=await caller.visible_dag_ids(conn),
            limit=limit,
            after_asked=asked,
            after_task=TaskKey(run_id, small(idx), small(map_index)),
        )
    return page_of(found, limit, lambda row: (row.asked_at.isoformat(), row.run_id, row.idx, row.map_index), _approval)


async def show_approval(caller: Caller, *, run_id: RunId, task: TaskName, map_index: MapIndex = -1) -> Approval:
    """Show the newest approval of a task, open or decided."""
    async with caller.read() as conn:
        await find_run(caller, conn, run_id)
        return _approval(await find_approval(conn, run_id=run_id, task=task, map_index=map_index))


async def decide_approval(
    caller: Caller, *, run_id: RunId, task: TaskName, body: ApprovalDecision, map_index: MapIndex = -1
) -> Approval:
    """Approve or reject. The first decision stands; a second one is refused with 409 and the name of the first user."""
    decision = Decision(
        is_approved=body.is_approved,
        actor=caller.actor,
        note=body.note,
        chosen=body.chosen,
        fields=lambda form: body.fields,
    )
    async with caller.write(Channel.TASKS, Channel.SCHEDULE) as conn:
        await find_run(caller, conn, run_id)
        row = await verbs.decide_approval(
            conn, run_id=run_id, task=task, map_index=map_index, decision=decision, role=caller.principal.role
        )
    return _approval(row)


# Events ---------------------------------------------------------------------------------------------------------------


async def send_event(
    caller: Caller, *, name: EventName, body: EventRequest | None = None, idempotency_key: IdempotencyKey = None
) -> SentEvent:
    """Send an event. A second request with the same Idempotency-Key returns the first event with 200 instead of 201."""
    payload = body.payload if body else None
    async with caller.write(Channel.SCHEDULE) as conn:
        return await verbs.send_event(conn, name=name, payload=payload, actor=caller.actor, key=idempotency_key)


async def list_sent_events(
    caller: Caller,
    *,
    name: Annotated[str | None, MaxLen(1000), Doc("Only events with this name.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[EventRow]:
    """List sent events, newest first."""
    if name is not None and (problem := check_event_name(name)):
        raise UserError(f"{name[:100]!r} cannot name an event: {problem}.")
    (before,) = read_cursor(cursor, LARGEST)
    async with caller.read() as conn:
        found = await waits.list_events(conn, name=name, before=before, limit=limit)
    return page_of(found, limit, lambda row: (row.event_id,), lambda row: row)


# Assets ---------------------------------------------------------------------------------------------------------------


async def list_assets(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Asset]:
    """List the assets that a DAG updates or waits for, by name."""
    async with caller.read() as conn:
        return short_page(await assets.list_whole(conn), limit, cursor, lambda row: (row.name,), lambda row: row)


async def list_partitions(
    caller: Caller, *, name: AssetName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[AssetPartition]:
    """List the partitions of an asset that were updated, the highest key first, each with its last update."""
    (before,) = cast("tuple[str]", read_cursor(cursor, ""))
    async with caller.read() as conn:
        await find_asset(conn, name)
        found = await assets.partitions_of_asset(conn, asset=name, before=before or None, limit=limit)
    return page_of(found, limit, lambda row: (row.key,), lambda row: row)


async def record_asset_update(caller: Caller, *, name: AssetName, body: AssetUpdate | None = None) -> AssetEvent:
    """Report an update of an asset from outside. DAGs that run after it start as after a task's update."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_asset(conn, name)
        told = body or AssetUpdate()
        return await update_asset(conn, asset=name, extra=told.extra, actor=caller.actor, partition=told.partition)


def _approval(row: ApprovalRow) -> Approval:
    wait = row.wait
    return record_of(
        Approval,
        row,
        task_index=row.idx,
        form=wait.get("form", []),
        approvers=wait.get("approvers"),
        is_open=bool(row.is_open),
        body=wait.get("body"),
        options=wait.get("options"),
        is_multiple=bool(wait.get("multiple")),
        users=[each["name"] or each["id"] for each in wait.get("users", [])],
    )
