"""The change feed: the live state of runs and tasks as server-sent events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request

from evertick.api.auth import GuardedRoute, refuse_foreign_reader, requires
from evertick.api.context import Who
from evertick.api.event_hub import EventStream
from evertick.domain.access import Permission
from evertick.operations.paging import LARGEST
from evertick.operations.runs import find_run

router = APIRouter(route_class=GuardedRoute, tags=["events"])

MOST_NAMED = 50

DagNames = Annotated[
    list[Annotated[str, Query(max_length=250)]],
    Query(default_factory=list, max_length=MOST_NAMED, description="Only these DAGs, and the runs in `run`."),
]
RunIds = Annotated[
    list[Annotated[int, Query(ge=1, le=LARGEST)]],
    Query(default_factory=list, max_length=MOST_NAMED, description="Only these runs, and the DAGs in `dag`."),
]
After = Annotated[str | None, Query(max_length=100, description="Continue after the event with this id.")]
LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=100, description="The same as `after`, sent by browsers.")
]
STREAM = {200: {"description": "Events, until either side ends it.", "content": {"text/event-stream": {}}}}


@router.get("/events", status_code=200, response_class=EventStream, responses=STREAM)  # type: ignore[arg-type]
@requires(Permission.READ_RUNS)
async def watch(
    request: Request, caller: Who, dag: DagNames, run: RunIds, after: After = None, last_event_id: LastEventId = None
) -> EventStream:
    """Stream the live state of runs and tasks. The first event is `hello`. After a `reset`, read the state again."""
    refuse_foreign_reader(request, caller)
    async with caller.read() as conn:
        for name in dag:
            await caller.dag(conn, name)
        for run_id in run:
            await find_run(caller, conn, run_id)
    hub = caller.desk.hub
    watcher = hub.join(caller.principal, runs=run, dags=dag)
    try:
        await hub.started()
    except BaseException:
        hub.leave(watcher)
        raise
    return EventStream(hub.events(watcher, after=last_event_id or after), on_close=lambda: hub.leave(watcher))
