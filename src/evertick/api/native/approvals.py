"""What tasks ask people, and the answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.native.runs import RunId, find_run
from evertick.api.native.tasks import MapIndex, TaskName
from evertick.api.paging import USUAL_ITEMS, Limit, Page
from evertick.db.notify import Channel
from evertick.db.queries import waits
from evertick.db.queries.waits import ApprovalRow
from evertick.domain.access import Permission
from evertick.engine.waits import LONGEST_NOTE, Decision, decide_approval, find_approval

router = APIRouter(route_class=GuardedRoute, tags=["approvals"])


class Approval(BaseModel):
    """`form`: the fields, declared as params of a DAG are. `is_open`: the task still waits for this answer."""

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


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_approved: bool
    note: Annotated[str, Field(max_length=LONGEST_NOTE)] | None = None
    fields: dict[str, Any] = {}


@router.get("/approvals")
@requires(Permission.READ_RUNS)
async def list_approvals(caller: Who, limit: Limit = USUAL_ITEMS) -> Page[Approval]:
    """What is asked now, the oldest first."""
    async with caller.reading() as conn:
        found = await waits.list_approvals(conn, dag_ids=await caller.visible(conn), limit=limit)
    return Page(items=[_approval(row) for row in found], next_cursor=None)


@router.get("/runs/{run_id}/tasks/{task}/approval")
@requires(Permission.READ_RUNS)
async def show_approval(run_id: RunId, task: TaskName, caller: Who, map_index: MapIndex = -1) -> Approval:
    """The newest question of a task, open or decided."""
    async with caller.reading() as conn:
        await find_run(caller, conn, run_id)
        return _approval(await find_approval(conn, run_id=run_id, task=task, map_index=map_index))


@router.post("/runs/{run_id}/tasks/{task}/approval")
@requires(Permission.DECIDE_APPROVALS)
async def decide(run_id: RunId, task: TaskName, wanted: Verdict, caller: Who, map_index: MapIndex = -1) -> Approval:
    """Approve or reject. The first decision stands; a second one is answered with 409 and who decided."""
    decision = Decision(
        is_approved=wanted.is_approved, actor=caller.actor, note=wanted.note, fields=lambda form: wanted.fields
    )
    async with caller.changing(Channel.READY, Channel.PLAN) as conn:
        await find_run(caller, conn, run_id)
        row = await decide_approval(
            conn, run_id=run_id, task=task, map_index=map_index, decision=decision, role=caller.principal.role
        )
    return _approval(row)


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
