"""The native API: its routes are made from the table of operations. Those that stream are written by hand."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, get_args, get_origin

from annotated_doc import Doc
from fastapi import APIRouter, Body, Header, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from evertick.api import push_webhook, webhooks
from evertick.api.auth import GuardedRouter, NativeRoute, refuse_foreign_reader, requires
from evertick.api.context import ApiCaller, Who
from evertick.api.event_hub import EventStream, TextStream, event, heartbeat
from evertick.api.openapi import errors_of
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import StorageUnavailable
from evertick.logs.format import Line, lines_of
from evertick.operations import task_logs
from evertick.operations.paging import LARGEST, Cursor, Page, Tagged, TextPattern, is_unchanged
from evertick.operations.routes import HEADERS, ROUTES, Route
from evertick.operations.runs import RunId, find_run
from evertick.operations.tasks import MapIndex, TaskName, find_task


def native_routers() -> list[APIRouter]:
    return [router_of(ROUTES), streams, push_webhook.router, webhooks.router]


def router_of(routes: tuple[Route, ...]) -> APIRouter:
    router = GuardedRouter(NativeRoute)
    for route in routes:
        if route.stream is not None:
            continue
        router.add_api_route(
            route.path,
            requires(route.permission)(endpoint_of(route)),
            methods=[route.method],
            tags=[route.tag],
            summary=_summary_of(route.function),
            operation_id=route.name or route.function.__name__,
            # Without a status of its own a route can be answered without the framework.
            status_code=None if route.status == 200 else route.status,
            responses=_responses_of(route),
        )
    return router


def _responses_of(route: Route) -> dict[int | str, dict[str, Any]]:
    declared = errors_of(route.function, method=route.method, path=route.path, others=route.errors)
    returned, is_tagged = _returned(route)
    if route.repeated_status is not None:
        declared[route.repeated_status] = {"model": returned, "description": "It existed already."}
    if is_tagged and route.method == "GET":
        declared[304] = {"description": "It still has the ETag in If-None-Match."}
    return declared


def _returned(route: Route) -> tuple[Any, bool]:
    """The record that an operation returns, and whether it has an ETag."""
    annotation = inspect.signature(route.function, eval_str=True).return_annotation
    is_tagged = get_origin(annotation) is Tagged
    return get_args(annotation)[0] if is_tagged else annotation, is_tagged


def endpoint_of(route: Route) -> Callable[..., Any]:
    """The operation as a function that FastAPI can call: with its constraints, and with the record of its result."""
    operation = inspect.signature(route.function, eval_str=True)
    caller, *given = (each for each in operation.parameters.values() if each.name not in route.fixed)
    parameters = [caller.replace(annotation=Who, kind=inspect.Parameter.KEYWORD_ONLY)]
    parameters += [each.replace(annotation=_annotation_of(route, each)) for each in given]
    returned, is_tagged = _returned(route)
    if is_tagged or route.repeated_status is not None:
        parameters.append(inspect.Parameter("response", inspect.Parameter.KEYWORD_ONLY, annotation=Response))
    if is_tagged and route.method == "GET":
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("if_none_match", kind, annotation=IfNoneMatch, default=None))
    endpoint = _endpoint_of(route, is_tagged=is_tagged)
    endpoint.__name__, endpoint.__doc__ = route.name or route.function.__name__, route.function.__doc__
    endpoint.__signature__ = operation.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return endpoint


def _summary_of(function: Callable[..., Any]) -> str:
    """The first sentence of the docstring."""
    return (inspect.getdoc(function) or "").split(".")[0].split(":")[0].replace("\n", " ")


def _endpoint_of(route: Route, *, is_tagged: bool) -> Callable[..., Any]:
    """`response` is given for a record that also decides the headers or the status of the response."""

    async def endpoint(*, response: Response | None = None, if_none_match: str | None = None, **values: Any) -> Any:
        found = await route.function(**values, **route.fixed)
        if response is None:
            return found
        record = found.record if is_tagged else found
        if is_tagged:
            if is_unchanged(if_none_match, found.etag):
                return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": found.etag})
            response.headers["ETag"] = found.etag
        if route.repeated_status is not None:
            is_new = found.is_new if is_tagged else record.is_new
            response.status_code = route.status if is_new else route.repeated_status
        return record

    return endpoint


def _annotation_of(route: Route, parameter: inspect.Parameter) -> Any:
    """The parameter's type with its place in the request."""
    if parameter.name == "body":
        return parameter.annotation
    if parameter.name == "content":
        return Annotated[bytes, Body(media_type=OCTETS)]
    kind, *metadata = (
        get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [parameter.annotation]
    )
    options: dict[str, Any] = {}
    for each in metadata:
        if isinstance(each, Doc):
            options["description"] = each.documentation
        elif isinstance(each, TextPattern):
            options["pattern"] = each.regex
    if f"{{{parameter.name}}}" in route.path:
        place: Any = Path(**options)
    elif parameter.name in HEADERS:
        place = Header(**options)
    else:
        place = Query(**options)
    constraints = [each for each in metadata if not isinstance(each, Doc | TextPattern)]
    return Annotated[(kind, *constraints, place)]


OCTETS = "application/octet-stream"

streams = GuardedRouter(NativeRoute)

IfNoneMatch = Annotated[
    str | None,
    Header(max_length=1000, description="ETags that you have. If the current one is among them, the response is 304."),
]
_LOG = "/runs/{run_id}/tasks/{task}/logs"
_LOG_ERRORS = errors_of(task_logs.read_log, method="GET", path=_LOG, others=[502])
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=task_logs.LONGEST_PLACE)]
EVENTS = EventStream.media_type

_Events = AsyncGenerator[task_logs.NewLines | task_logs.LogEnd | task_logs.LogHeartbeat, None]


@streams.get(
    _LOG,
    Permission.READ_LOGS,
    Page[task_logs.LogLine],
    tags=["tasks"],
    operation_id="read_log",
    summary="Read the lines of a task",
    responses={200: {"content": {EVENTS: {}}}, **_LOG_ERRORS},
)
async def read_log(
    request: Request,
    run_id: RunId,
    task: TaskName,
    caller: Who,
    map_index: MapIndex = -1,
    cursor: Cursor = None,
    follow: bool = False,
    after: task_logs.After = None,
    last_event_id: LastEventId = None,
) -> Page[task_logs.LogLine] | EventStream:
    """Read the lines of a task. While the task runs, the last page grows: request it again.

    With `follow` the response is a stream of server-sent events until the task has ended.
    """
    if not follow:
        return await task_logs.read_log(caller, run_id=run_id, task=task, map_index=map_index, cursor=cursor)
    refuse_foreign_reader(request, caller)
    events = await task_logs.follow_log(
        caller, run_id=run_id, task=task, map_index=map_index, after=last_event_id or after
    )
    return _counted(caller, _as_events(events), EventStream)


@streams.get(
    f"{_LOG}.txt",
    Permission.READ_LOGS,
    tags=["tasks"],
    operation_id="read_log_text",
    summary="Read the whole log as text",
    response_class=PlainTextResponse,
    responses=_LOG_ERRORS,
)
async def stream_log(
    request: Request, run_id: RunId, task: TaskName, caller: Who, map_index: MapIndex = -1, follow: bool = False
) -> StreamingResponse:
    """Read the whole log as text; with `follow` until the task has ended."""
    if follow:
        refuse_foreign_reader(request, caller)
        events = await task_logs.follow_log(caller, run_id=run_id, task=task, map_index=map_index)
        return _counted(caller, _as_text(events), TextStream)
    async with caller.read() as conn:
        _, key = await find_task(caller, conn, run_id, task, map_index)
    return StreamingResponse(_whole_text(caller, key), media_type=TextStream.media_type)


def _counted(caller: ApiCaller, texts: AsyncGenerator[str, None], kind: type[EventStream]) -> EventStream:
    """A response that counts as one of the user's open streams."""
    limit, user = caller.context.log_streams, caller.principal.name
    limit.take(user)
    return kind(texts, on_close=lambda: limit.leave(user))


async def _as_events(events: _Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for each in events:
            match each:
                case task_logs.NewLines():
                    lines = [{"at": _zulu(line.at), "level": line.level, "text": line.text} for line in each.lines]
                    facts = {"epoch": each.epoch, "is_late": each.is_late, "lines": lines}
                    yield event(each.event, facts, id=each.id)
                case task_logs.LogEnd(reason=None):
                    yield event(each.event, {"state": each.state}, id=each.id)
                case task_logs.LogEnd():
                    yield event(each.event, {"reason": each.reason}, id=each.id)
                case task_logs.LogHeartbeat():
                    yield heartbeat(id=each.id)


async def _as_text(events: _Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for each in events:
            match each:
                case task_logs.NewLines():
                    yield "".join(_line_text(line, is_late=each.is_late) for line in each.lines)
                case task_logs.LogEnd(reason=str()):
                    yield _mark_text(f"The rest is not shown: {each.reason}")
                case _:
                    pass


async def _whole_text(caller: ApiCaller, key: TaskKey) -> AsyncIterator[str]:
    """No connection is held while the client reads: a slow client delays no others."""
    after, is_more = (0, -1), True
    while is_more:
        try:
            found = await caller.log_reader.read(key, after=after, limit=task_logs.CHUNKS_PER_PAGE)
        except StorageUnavailable as error:
            # The response has begun: the text itself must say that it is incomplete.
            yield _mark_text(f"The rest cannot be read now: {error}")
            return
        for chunk in found:
            after = (chunk.epoch, chunk.seq)
            lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
            yield "".join(_line_text(line, is_late=line.is_late) for line in lines)
        is_more = len(found) == task_logs.CHUNKS_PER_PAGE


def _mark_text(text: str) -> str:
    return _line_text(task_logs.NewLine(at=None, level="MARK", text=text), is_late=False)


def _line_text(line: task_logs.NewLine | Line, *, is_late: bool) -> str:
    at = line.at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if line.at else "-"
    return f"{at} {line.level} {line.text}{' (late)' if is_late else ''}\n"


def _zulu(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat().replace("+00:00", "Z")


MOST_NAMED = 50

DagNames = Annotated[
    list[Annotated[str, Query(max_length=250)]],
    Query(default_factory=list, max_length=MOST_NAMED, description="Only these DAGs, and the runs in `run`."),
]
RunIds = Annotated[
    list[Annotated[int, Query(ge=1, le=LARGEST)]],
    Query(default_factory=list, max_length=MOST_NAMED, description="Only these runs, and the DAGs in `dag`."),
]
AfterEvent = Annotated[str | None, Query(max_length=100, description="Continue after the event with this id.")]
LastSeen = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=100, description="The same as `after`, sent by browsers.")
]
STREAM = {"description": "Events, until either side ends it.", "content": {"text/event-stream": {}}}


@streams.get(
    "/events",
    Permission.READ_RUNS,
    tags=["events"],
    operation_id="watch_events",
    summary="Stream the live state of runs and tasks",
    status_code=200,
    response_class=EventStream,
    responses={200: STREAM, **errors_of(find_run, method="GET", path="/events", others=[404])},
)
async def watch_events(
    request: Request, caller: Who, dag: DagNames, run: RunIds, after: AfterEvent = None, last_event_id: LastSeen = None
) -> EventStream:
    """Stream the live state of runs and tasks. The first event is `hello`. After a `reset`, read the state again."""
    refuse_foreign_reader(request, caller)
    async with caller.read() as conn:
        for name in dag:
            await caller.dag(conn, name)
        for run_id in run:
            await find_run(caller, conn, run_id)
    hub = caller.context.event_hub
    watcher = hub.join(caller.principal, runs=run, dags=dag)
    try:
        await hub.started()
    except BaseException:
        hub.leave(watcher)
        raise
    return EventStream(hub.events(watcher, after=last_event_id or after), on_close=lambda: hub.leave(watcher))
