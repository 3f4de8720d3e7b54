"""Pages of approvals and assets. A pending approval has a form for each decision, with errors next to the fields."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from evertick.api.context import Who
from evertick.db.queries import assets
from evertick.domain.access import Permission, Role
from evertick.domain.dags.spec import read_form
from evertick.domain.errors import UserError
from evertick.engine.waits import LONGEST_NOTE, find_approval
from evertick.operations import waits as operations
from evertick.operations.paging import like
from evertick.operations.runs import RunId, find_run
from evertick.operations.waits import ApprovalDecision
from evertick.ui.layout import Form, done, page, page_router, segment
from evertick.ui.pages.dag import Field, empty_fields, read_fields
from evertick.ui.pages.task import TaskName

router = page_router()


_SHOWN = 200


@router.get("/approvals", Permission.READ_RUNS)
async def list_approvals(request: Request, caller: Who) -> Response:
    """List pending approvals, oldest first."""
    found = await operations.list_approvals(caller, limit=_SHOWN)
    return page(request, "approvals.html", here="approvals", rows=found.items)


@router.get("/runs/{run_id}/tasks/{task}/approval", Permission.READ_RUNS)
async def show_approval(run_id: RunId, task: TaskName, request: Request, caller: Who) -> Response:
    return await _show(request, caller, run_id, task)


@router.post("/runs/{run_id}/tasks/{task}/approval", Permission.DECIDE_APPROVALS)
async def decide(run_id: RunId, task: TaskName, request: Request, form: Form, caller: Who) -> Response:
    verdict = form.get("verdict", "")
    if verdict not in ("approve", "reject", "answer"):
        raise UserError("Choose Approve or Reject.")
    async with caller.read() as conn:
        await find_run(caller, conn, run_id)
        row = await find_approval(conn, run_id=run_id, task=task)
    fields, given = read_fields(read_form(row.wait), form)
    chosen = None
    if verdict == "answer":
        chosen = [value for name, value in form.items() if name == "chosen" or name.startswith("chosen.")]
    is_approved = verdict != "reject"
    if is_approved and any(field.error for field in fields):
        return await _show(request, caller, run_id, task, fields=fields, note=form.get("note", ""), status=422)
    note = form.get("note", "").strip() or None
    decision = ApprovalDecision(is_approved=is_approved, note=note, fields=given if is_approved else {}, chosen=chosen)
    await operations.decide_approval(caller, run_id=run_id, task=task, body=decision)
    did = "answered" if chosen else "approved" if is_approved else "rejected"
    return done(f"{row.title}: {did}.", go=f"/runs/{run_id}/tasks/{segment(task)}")


async def _show(
    request: Request,
    caller: Who,
    run_id: int,
    task: str,
    *,
    fields: list[Field] | None = None,
    note: str = "",
    status: int = 200,
) -> Response:
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        row = await find_approval(conn, run_id=run_id, task=task)
    lowest = row.wait.get("approvers")
    is_high_enough = lowest is None or caller.principal.role.rank >= Role(lowest).rank
    return page(
        request,
        "approval.html",
        status=status,
        here="approvals",
        run=run,
        row=row,
        fields=empty_fields(read_form(row.wait)) if fields is None else fields,
        note=note,
        longest=LONGEST_NOTE,
        lowest=lowest,
        may_decide=bool(row.is_open) and is_high_enough and caller.principal.may(Permission.DECIDE_APPROVALS),
    )


Name = Annotated[str, Path(max_length=1000)]


Text = Annotated[str, Query(max_length=1000)]


@router.get("/assets", Permission.READ_GATES)
async def list_assets(request: Request, caller: Who, q: Text = "", after: Text = "") -> Response:
    sought = q.strip().replace("\x00", "")
    async with caller.read() as conn:
        found = await assets.page(
            conn, like=like(sought) if sought else None, after=after.replace("\x00", ""), limit=_SHOWN
        )
    next_name = found[-1].name if len(found) == _SHOWN else None
    return page(request, "assets.html", here="assets", rows=found, q=q, next_name=next_name)


@router.post("/assets/{name:path}/update", Permission.SEND_EVENTS)
async def record_update(name: Name, caller: Who) -> Response:
    """Report an external update of the asset."""
    await operations.record_asset_update(caller, name=name)
    return done(f"Asset {name} updated. DAGs that depend on it are notified.")
