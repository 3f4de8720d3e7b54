"""Notes on runs and tasks."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.native.runs import RunId, find_run
from evertick.domain.access import Permission
from evertick.engine.write_note import of_run, write_note
from evertick.ui.frame import PageRoute, done, form_of
from evertick.ui.pages.task import MapIndex, TaskName, find_task

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.post("/runs/{run_id}/note")
@needs(Permission.MARK_TASKS)
async def note_run(run_id: RunId, request: Request, caller: Who) -> Response:
    content = await _content(request)
    async with caller.changing() as conn:
        await find_run(caller, conn, run_id)
        await write_note(conn, of_run(run_id), content=content, actor=caller.actor)
    return _told(content)


@router.post("/runs/{run_id}/tasks/{task}/note")
@needs(Permission.MARK_TASKS)
async def note_task(run_id: RunId, task: TaskName, request: Request, caller: Who, map_index: MapIndex = -1) -> Response:
    content = await _content(request)
    async with caller.changing() as conn:
        _, _, key = await find_task(caller, conn, run_id, task, map_index)
        await write_note(conn, key, content=content, actor=caller.actor)
    return _told(content)


async def _content(request: Request) -> str | None:
    """The submitted note, or None if it is blank. Browsers send CR LF line ends, which are normalized."""
    return (await form_of(request)).get("content", "").replace("\r\n", "\n").strip() or None


def _told(content: str | None) -> Response:
    return done("Note removed." if content is None else "Note saved.")
