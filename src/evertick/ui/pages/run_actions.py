"""Cancel, clear and mark, each with a preview of the affected tasks. They call the same engine verbs as the API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.native.runs import AFFECTED, RunId, find_run
from evertick.domain.access import Permission
from evertick.domain.errors import UserError
from evertick.engine.cancel import cancel
from evertick.engine.clear import clear, full_name, select_cleared
from evertick.engine.mark import MARKABLE, mark
from evertick.store import tasks
from evertick.store.wake import Channel
from evertick.ui.frame import PageRoute, done, form_of, page
from evertick.ui.pages.task import MapIndex, TaskName, find_task

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LONGEST_REASON = 1000
NamedTask = Annotated[str, Query(max_length=1100)]


@router.post("/runs/{run_id}/cancel")
@needs(Permission.CANCEL_RUNS)
async def cancel_run(run_id: RunId, request: Request, caller: Who) -> Response:
    reason = (await form_of(request)).get("reason", "").strip()
    if len(reason) > _LONGEST_REASON:
        raise UserError(f"The reason is too long: the limit is {_LONGEST_REASON} characters.")
    async with caller.changing(Channel.STOP, Channel.READY) as conn:
        await find_run(caller, conn, run_id)
        asked = await cancel(conn, run_id=run_id, actor=caller.actor, reason=reason or None)
    return done(f"Run {run_id} canceled" + (f"; stopping {_tasks(asked)}." if asked else "."))


@router.get("/runs/{run_id}/clear")
@needs(Permission.CLEAR_TASKS)
async def preview_clear(
    run_id: RunId,
    request: Request,
    caller: Who,
    task: NamedTask = "",
    which: Annotated[str, Query(pattern="^(all|failed|named)$")] = "all",
    downstream: bool = False,
) -> Response:
    """Preview the tasks that a clear runs again, as a fragment of the dialog."""
    async with caller.reading() as conn:
        await find_run(caller, conn, run_id)
        chosen = await select_cleared(
            conn,
            run_id=run_id,
            names=[task] if which == "named" else [],
            only_failed=which == "failed",
            with_downstream=downstream,
        )
    affected = [row for row in chosen if row.state in AFFECTED]
    running = sum(row.state in ("running", "queued") for row in affected)
    return page(request, "clear_preview.html", affected=affected, running=running, full_name=full_name)


@router.post("/runs/{run_id}/clear")
@needs(Permission.CLEAR_TASKS)
async def clear_run(run_id: RunId, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    which, task = form.get("which", ""), form.get("task", "")
    if which not in ("all", "failed", "named") or (which == "named" and not task):
        raise UserError("Choose which tasks to run again.")
    async with caller.changing(Channel.READY, Channel.STOP, Channel.PLAN) as conn:
        await find_run(caller, conn, run_id)
        chosen = await select_cleared(
            conn,
            run_id=run_id,
            names=[task] if which == "named" else [],
            only_failed=which == "failed",
            with_downstream=form.get("downstream") == "true",
        )
        affected = [row for row in chosen if row.state in AFFECTED]
        if not affected:
            raise UserError("Nothing to clear: none of these tasks has run.")
        cleared = await clear(conn, run_id=run_id, chosen=affected, actor=caller.actor)
    stopped = f"; stopping {_tasks(cleared.asked)} first" if cleared.asked else ""
    return done(f"{_tasks(len(affected))} of run {run_id} cleared{stopped}.")


@router.get("/runs/{run_id}/tasks/{task}/mark")
@needs(Permission.MARK_TASKS)
async def preview_mark(
    run_id: RunId, task: TaskName, request: Request, caller: Who, map_index: MapIndex = -1
) -> Response:
    """Preview the downstream tasks that would be decided again, as a fragment of the dialog."""
    async with caller.reading() as conn:
        run, row, _ = await find_task(caller, conn, run_id, task, map_index)
        below = set(await tasks.downstream(conn, version_id=run.version_id, idxs=[row.idx]))
        rows = await tasks.list_of_run(conn, run_id=run_id)
    return page(request, "mark_preview.html", row=row, below=[each for each in rows if each.idx in below])


@router.post("/runs/{run_id}/tasks/{task}/mark")
@needs(Permission.MARK_TASKS)
async def mark_task(run_id: RunId, task: TaskName, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    state = form.get("state", "")
    if state not in MARKABLE:
        raise UserError(f"Choose a state to mark the task with: {', '.join(MARKABLE)}.")
    try:
        map_index = int(form.get("map_index", "-1"))
    except ValueError:
        raise UserError("map_index must be a whole number.") from None
    async with caller.changing(Channel.READY, Channel.STOP, Channel.PLAN) as conn:
        _, _, key = await find_task(caller, conn, run_id, task, map_index)
        outcome = await mark(conn, key, state=state, actor=caller.actor)
    then = "marked" if outcome == "marked" else "is stopping and will be marked"
    return done(f"{task} of run {run_id} {then} {state}.")


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"
