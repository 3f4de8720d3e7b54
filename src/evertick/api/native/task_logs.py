"""The log of a task over HTTP: as pages, as server-sent events, and as text.

These routes are written by hand, because they stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from evertick.api.auth import GuardedRoute, refuse_foreign_reader, requires
from evertick.api.context import ApiCaller, Who
from evertick.api.event_hub import EventStream, TextStream, event, heartbeat
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import StorageUnavailable
from evertick.logs.format import Line, lines_of
from evertick.operations import task_logs
from evertick.operations.paging import Cursor, Page
from evertick.operations.runs import RunId
from evertick.operations.task_logs import (
    CHUNKS_PER_PAGE,
    LONGEST_PLACE,
    After,
    LogEnd,
    LogHeartbeat,
    LogLine,
    NewLine,
    NewLines,
    follow_log,
)
from evertick.operations.tasks import MapIndex, TaskName, find_task

router = APIRouter(route_class=GuardedRoute, tags=["tasks"])

LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=LONGEST_PLACE)]
EVENTS = EventStream.media_type

_Events = AsyncGenerator[NewLines | LogEnd | LogHeartbeat, None]


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
    cursor: Cursor = None,
    follow: bool = False,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Page[LogLine] | EventStream:
    """Read the lines of a task. While the task runs, the last page grows: request it again.

    With `follow` the response is a stream of server-sent events until the task has ended.
    """
    if not follow:
        return await task_logs.read_log(caller, run_id=run_id, task=task, map_index=map_index, cursor=cursor)
    refuse_foreign_reader(request, caller)
    events = await follow_log(caller, run_id=run_id, task=task, map_index=map_index, after=last_event_id or after)
    return _counted(caller, _as_events(events), EventStream)


@router.get("/runs/{run_id}/tasks/{task}/logs.txt", response_class=PlainTextResponse)
@requires(Permission.READ_LOGS)
async def stream_log(
    request: Request, run_id: RunId, task: TaskName, caller: Who, map_index: MapIndex = -1, follow: bool = False
) -> StreamingResponse:
    """Read the whole log as text; with `follow` until the task has ended."""
    if follow:
        refuse_foreign_reader(request, caller)
        events = await follow_log(caller, run_id=run_id, task=task, map_index=map_index)
        return _counted(caller, _as_text(events), TextStream)
    async with caller.read() as conn:
        _, key = await find_task(caller, conn, run_id, task, map_index)
    return StreamingResponse(_whole_text(caller, key), media_type=TextStream.media_type)


def _counted(caller: ApiCaller, texts: AsyncGenerator[str, None], kind: type[EventStream]) -> EventStream:
    """A response that counts as one of the user's open streams."""
    seats, user = caller.desk.log_seats, caller.principal.name
    seats.take(user)
    return kind(texts, on_close=lambda: seats.leave(user))


async def _as_events(events: _Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for each in events:
            match each:
                case NewLines():
                    lines = [{"at": _zulu(line.at), "level": line.level, "text": line.text} for line in each.lines]
                    facts = {"epoch": each.epoch, "is_late": each.is_late, "lines": lines}
                    yield event(each.event, facts, id=each.id)
                case LogEnd(reason=None):
                    yield event(each.event, {"state": each.state}, id=each.id)
                case LogEnd():
                    yield event(each.event, {"reason": each.reason}, id=each.id)
                case LogHeartbeat():
                    yield heartbeat(id=each.id)


async def _as_text(events: _Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for each in events:
            match each:
                case NewLines():
                    yield "".join(_line_text(line, is_late=each.is_late) for line in each.lines)
                case LogEnd(reason=str()):
                    yield _mark_text(f"The rest is not shown: {each.reason}")
                case _:
                    pass


async def _whole_text(caller: ApiCaller, key: TaskKey) -> AsyncIterator[str]:
    """No connection is held while the client reads: a slow client delays no others."""
    after, is_more = (0, -1), True
    while is_more:
        try:
            found = await caller.log_reader.read(key, after=after, limit=CHUNKS_PER_PAGE)
        except StorageUnavailable as error:
            # The response has begun: the text itself must say that it is incomplete.
            yield _mark_text(f"The rest cannot be read now: {error}")
            return
        for chunk in found:
            after = (chunk.epoch, chunk.seq)
            lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
            yield "".join(_line_text(line, is_late=line.is_late) for line in lines)
        is_more = len(found) == CHUNKS_PER_PAGE


def _mark_text(text: str) -> str:
    return _line_text(NewLine(at=None, level="MARK", text=text), is_late=False)


def _line_text(line: NewLine | Line, *, is_late: bool) -> str:
    at = line.at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if line.at else "-"
    return f"{at} {line.level} {line.text}{' (late)' if is_late else ''}\n"


def _zulu(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat().replace("+00:00", "Z")
