"""What tasks and DAGs wait for from outside: events, approvals, and updates of assets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, ClassVar

from annotated_doc import Doc
from annotated_types import MaxLen

from evertick.db.notify import Channel
from evertick.db.queries import assets, waits
from evertick.db.queries.assets import Asset, AssetEvent
from evertick.db.queries.waits import ApprovalRow, EventRow, Sent
from evertick.domain.dags.waits import check_event_name
from evertick.domain.errors import UserError
from evertick.engine.waits import (
    LONGEST_NOTE,
    Decision,
    decide_approval,
    find_approval,
    find_asset,
    send_event,
    update_asset,
)
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    LARGEST,
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    Limit,
    Page,
    encode_cursor,
    read_cursor,
)
from evertick.operations.runs import RunId, find_run
from evertick.operations.tasks import MapIndex, TaskName

EventName = Annotated[str, MaxLen(1000), Doc("The event's name, as tasks wait for it.")]
AssetName = Annotated[str, MaxLen(1000), Doc("The asset's name, as in the DAG.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """`extra` is stored with the update."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """A request for approval. `form` has its fields, declared like the parameters of a DAG. `is_open`: the task still
    waits for the decision."""

    run_id: int
    idx: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    is_approved: bool
    note: Annotated[str, MaxLen(LONGEST_NOTE)] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


# Approvals ------------------------------------------------------------------------------------------------------------


async def list_approvals(caller: Caller, *, limit: Limit = USUAL_ITEMS) -> Page[Approval]:
    """List the approvals that tasks wait for, oldest first."""
    async with caller.read() as conn:
        found = await waits.list_approvals(conn, dag_ids=await caller.visible_dag_ids(conn), limit=limit)
    return Page(items=[_approval(row) for row in found], next_cursor=None)


async def show_approval(caller: Caller, *, run_id: RunId, task: TaskName, map_index: MapIndex = -1) -> Approval:
    """Show the newest approval of a task, open or decided."""
    async with caller.read() as conn:
        await find_run(caller, conn, run_id)
        return _approval(await find_approval(conn, run_id=run_id, task=task, map_index=map_index))


async def decide(caller: Caller, *, run_id: RunId, task: TaskName, body: Verdict, map_index: MapIndex = -1) -> Approval:
    """Approve or reject. The first decision stands; a second one is refused with 409 and the name of the first user."""
    decision = Decision(
        is_approved=body.is_approved, actor=caller.actor, note=body.note, fields=lambda form: body.fields
    )
    async with caller.write(Channel.TASKS, Channel.SCHEDULE) as conn:
        await find_run(caller, conn, run_id)
        row = await decide_approval(
            conn, run_id=run_id, task=task, map_index=map_index, decision=decision, role=caller.principal.role
        )
    return _approval(row)


# Events ---------------------------------------------------------------------------------------------------------------


async def send(
    caller: Caller, *, name: EventName, body: Event | None = None, idempotency_key: IdempotencyKey = None
) -> Sent:
    """Send an event. A second request with the same Idempotency-Key returns the first event with 200 instead of 201."""
    payload = body.payload if body else None
    async with caller.write(Channel.SCHEDULE) as conn:
        return await send_event(conn, name=name, payload=payload, actor=caller.actor, key=idempotency_key)


async def list_all_sent(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[EventRow]:
    """List the events of all names, newest first."""
    return await _events(caller, None, limit, cursor)


async def list_sent(
    caller: Caller, *, name: EventName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[EventRow]:
    """List the events of one name, newest first."""
    if problem := check_event_name(name):
        raise UserError(f"{name[:100]!r} cannot name an event: {problem}.")
    return await _events(caller, name, limit, cursor)


async def _events(caller: Caller, name: str | None, limit: int, cursor: str | None) -> Page[EventRow]:
    (before,) = read_cursor(cursor, LARGEST)
    async with caller.read() as conn:
        found = await waits.list_events(conn, name=name, before=before, limit=limit)
    next_cursor = encode_cursor(found[-1].event_id) if len(found) == limit else None
    return Page(items=found, next_cursor=next_cursor)


# Assets ---------------------------------------------------------------------------------------------------------------


async def list_assets(caller: Caller) -> Page[Asset]:
    """List the assets that a DAG updates or waits for, by name."""
    async with caller.read() as conn:
        return Page(items=await assets.list_whole(conn), next_cursor=None)


async def tell(caller: Caller, *, name: AssetName, body: Update | None = None) -> AssetEvent:
    """Report an update of an asset from outside. DAGs that run after it start as after a task's update."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_asset(conn, name)
        return await update_asset(conn, asset=name, extra=body.extra if body else {}, actor=caller.actor)


def _approval(row: ApprovalRow) -> Approval:
    return Approval(
        run_id=row.run_id,
        idx=row.idx,
        map_index=row.map_index,
        epoch=row.epoch,
        dag=row.dag,
        task=row.task,
        title=row.title,
        form=row.wait.get("form", []),
        approvers=row.wait.get("approvers"),
        asked_at=row.asked_at,
        deadline=row.deadline,
        is_open=bool(row.is_open),
        is_approved=row.is_approved,
        decided_by=row.decided_by,
        decided_at=row.decided_at,
        note=row.note,
        fields=row.fields,
    )
