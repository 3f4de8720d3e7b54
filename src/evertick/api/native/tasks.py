"""Tasks of a run: listing, attempts, results, logs, why, and marking."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict

from evertick.api.auth import GuardedRoute, refuse_foreign_reader, requires
from evertick.api.context import Caller, Who
from evertick.api.discretion import redact
from evertick.api.event_hub import EventStream, TextStream
from evertick.api.log_follow import Places, chunk_text, follow_text, mark_text
from evertick.api.log_follow import follow as follow_log
from evertick.api.native.runs import RunId, find_run
from evertick.api.paging import USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.notify import Channel
from evertick.db.queries import tasks
from evertick.db.queries.tasks import AttemptRow, TaskRow
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, StorageUnavailable, UserError
from evertick.domain.explain import Explained, describe
from evertick.domain.states import TaskState
from evertick.engine.tasks import MARKABLE, explain, mark
from evertick.logs.format import lines_of

router = APIRouter(route_class=GuardedRoute, tags=["tasks"])

TaskName = Annotated[str, Path(max_length=1000, description="The task's name.")]
MapIndex = Annotated[int, Query(ge=-1, le=2**31 - 1, description="Which of a mapped task's; -1 for one that is not.")]
PlaceInLog = Annotated[
    str | None, Query(max_length=2000, description="With `follow`: go on after the event with this id.")
]
LastPlaceInLog = Annotated[str | None, Header(alias="Last-Event-ID", max_length=2000)]
EVENTS = EventStream.media_type
_CHUNKS = 50


class TaskPage(BaseModel):
    task: TaskRow
    attempts: list[AttemptRow]
    result: Any


class LogLine(BaseModel):
    epoch: int
    at: datetime | None
    level: str
    text: str
    is_late: bool


class Why(BaseModel):
    """`reasons` with the most binding first; `upstream` is the task that it waits for, with its own."""

    run_id: int
    task: str
    state: str
    reasons: list[dict[str, Any]]
    upstream: Why | None = None


class Mark(BaseModel):
    model_config = ConfigDict(extra="forbid")
    state: TaskState
    map_index: int = -1


class Marked(BaseModel):
    """`marked`, or `asked`: it runs, and moves once it has stopped."""

    outcome: str


@router.get("/runs/{run_id}/tasks")
@requires(Permission.READ_RUNS)
async def list_tasks(
    run_id: RunId,
    caller: Who,
    state: TaskState | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[TaskRow]:
    """In the order in which they can run."""
    idx, map_index = read_cursor(cursor_text, -1, -1)
    async with caller.reading() as conn:
        await find_run(caller, conn, run_id)
        after = (_small(idx), _small(map_index))
        found = await tasks.page_of_run(conn, run_id=run_id, after=after, state=state, limit=limit)
    next_cursor = cursor(found[-1].idx, found[-1].map_index) if len(found) == limit else None
    return Page(items=found, next_cursor=next_cursor)


@router.get("/runs/{run_id}/tasks/{task}")
@requires(Permission.READ_RUNS)
async def show_task(run_id: RunId, task: TaskName, caller: Who, map_index: MapIndex = -1) -> TaskPage:
    """One task with every attempt and what it returned."""
    async with caller.reading() as conn:
        row, key = await _find(caller, conn, run_id, task, map_index)
        return TaskPage(task=row, attempts=await tasks.attempts(conn, key), result=await tasks.result(conn, key))


@router.get("/runs/{run_id}/tasks/{task}/why")
@requires(Permission.READ_RUNS)
async def why_task(run_id: RunId, task: TaskName, caller: Who) -> Why:
    """Why it does not run."""
    async with caller.reading() as conn:
        await _find(caller, conn, run_id, task, None)
        return _why(await redact(caller, conn, await explain(conn, run_id=run_id, task=task)))


@router.post("/runs/{run_id}/tasks/{task}/mark")
@requires(Permission.MARK_TASKS)
async def mark_task(run_id: RunId, task: TaskName, wanted: Mark, caller: Who) -> Marked:
    """Decide how it ended: success, failed or skipped."""
    if wanted.state not in MARKABLE:
        raise UserError(f"A task can be marked {', '.join(MARKABLE)}, not {wanted.state}.")
    async with caller.changing(Channel.READY, Channel.STOP, Channel.PLAN) as conn:
        _, key = await _find(caller, conn, run_id, task, wanted.map_index)
        return Marked(outcome=await mark(conn, key, state=wanted.state, actor=caller.actor))


@router.get(
    "/runs/{run_id}/tasks/{task}/logs", response_model=Page[LogLine], responses={200: {"content": {EVENTS: {}}}}
)
@requires(Permission.READ_LOGS)
async def read_log(
    request: Request,
    run_id: RunId,
    task: TaskName,
    caller: Who,
    map_index: MapIndex = -1,
    cursor_text: Cursor = None,
    follow: bool = False,
    after: PlaceInLog = None,
    last_event_id: LastPlaceInLog = None,
) -> Page[LogLine] | EventStream:
    """Its lines, chunk by chunk. The last page of a task that runs can be asked for again: it grows.

    With `follow` as server-sent events, until the task has ended.
    """
    epoch, seq = read_cursor(cursor_text, 0, -1)
    if follow:
        refuse_foreign_reader(request, caller)
    async with caller.reading() as conn:
        _, key = await _find(caller, conn, run_id, task, map_index)
        if follow:
            return _seated(caller, follow_log(caller, key, Places.read(last_event_id or after)), EventStream)
    found = await caller.log_reader.read(key, after=(_small(epoch), seq), limit=_CHUNKS)
    lines = [line for chunk in found for line in lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)]
    next_cursor = cursor(found[-1].epoch, found[-1].seq) if len(found) == _CHUNKS else None
    return Page(items=[LogLine(**line._asdict()) for line in lines], next_cursor=next_cursor)


@router.get("/runs/{run_id}/tasks/{task}/logs.txt", response_class=PlainTextResponse)
@requires(Permission.READ_LOGS)
async def stream_log(
    request: Request, run_id: RunId, task: TaskName, caller: Who, map_index: MapIndex = -1, follow: bool = False
) -> StreamingResponse:
    """All of it as text; with `follow` until the task has ended."""
    if follow:
        refuse_foreign_reader(request, caller)
    async with caller.reading() as conn:
        _, key = await _find(caller, conn, run_id, task, map_index)
    if follow:
        return _seated(caller, follow_text(caller, key), TextStream)
    return StreamingResponse(_text(caller, key), media_type=TextStream.media_type)


def _seated(caller: Caller, told: AsyncGenerator[str, None], kind: type[EventStream]) -> EventStream:
    seats, user = caller.desk.log_seats, caller.principal.name
    seats.take(user)
    return kind(told, on_close=lambda: seats.leave(user))


async def _text(caller: Caller, key: TaskKey) -> AsyncIterator[str]:
    """No connection is held while the reader reads: a slow one slows nobody."""
    after, is_more = (0, -1), True
    while is_more:
        try:
            found = await caller.log_reader.read(key, after=after, limit=_CHUNKS)
        except StorageUnavailable as error:
            # The answer has begun: whoever reads it must see that this is not all.
            yield mark_text(f"The rest cannot be read now: {error}")
            return
        for chunk in found:
            after = (chunk.epoch, chunk.seq)
            yield chunk_text(chunk)
        is_more = len(found) == _CHUNKS


async def _find(
    caller: Caller, conn: AsyncConnection, run_id: int, task: str, map_index: int | None
) -> tuple[TaskRow, TaskKey]:
    run = await find_run(caller, conn, run_id)
    for row in await tasks.by_name(conn, run_id=run_id, task=task):
        if map_index in (None, row.map_index):
            return row, TaskKey(run_id, row.idx, row.map_index)
    raise NotFound(f"Run {run_id} of {run.dag} has no task {task[:200]!r}.")


def _small(number: int) -> int:
    return max(-(2**31), min(number, 2**31 - 1))


def _why(found: Explained) -> Why:
    return Why(
        run_id=found.run_id,
        task=found.task,
        state=found.state,
        reasons=[{"kind": each.kind, "text": describe(each), **each.detail} for each in found.reasons],
        upstream=_why(found.upstream) if found.upstream else None,
    )
