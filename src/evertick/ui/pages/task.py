"""One task of a run: state and reasons, attempts, log, result and definition."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response
from fastapi.responses import JSONResponse
from psycopg import AsyncConnection

from evertick.api.context import ApiCaller, Who
from evertick.db.queries import dags, listings, logs, runs, tasks, waits
from evertick.db.queries.runs import RunRow
from evertick.db.queries.tasks import AttemptRow, TaskRow
from evertick.domain.access import Permission
from evertick.domain.attempt import RESULT_TAG, TaskKey
from evertick.domain.errors import NotFound, StorageUnavailable
from evertick.domain.explain import Explained, describe
from evertick.domain.states import TERMINAL_TASK_STATES
from evertick.engine.tasks import explain_row, full_name
from evertick.logs.format import Line
from evertick.operations.caller import redact
from evertick.operations.runs import RunId, find_run
from evertick.ui import log_view
from evertick.ui.charts.graph import edges_of
from evertick.ui.charts.history import concerns, of_task
from evertick.ui.layout import page, page_router

router = page_router()

TaskName = Annotated[str, Path(max_length=1000)]
MapIndex = Annotated[int, Query(ge=-1, le=2**31 - 1)]
_LONGEST_RESULT = 100_000


class TaskTab(StrEnum):
    LOG = "log"
    ATTEMPTS = "attempts"
    RESULT = "result"
    DETAILS = "details"


@router.get("/runs/{run_id}/tasks/{task}", Permission.READ_RUNS)
async def show_task(
    request: Request, run_id: RunId, task: TaskName, caller: Who, map_index: MapIndex = -1, tab: TaskTab = TaskTab.LOG
) -> Response:
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        rows = await tasks.by_name(conn, run_id=run_id, task=task)
        row = next((each for each in rows if each.map_index == map_index), None)
        if row is None and rows and map_index == -1:
            return page(request, "task_instances.html", here="runs", run=run, task=task, rows=rows)
        if row is None:
            raise _missing(run, task)
        key = TaskKey(run_id, row.idx, row.map_index)
        attempts = await tasks.attempts(conn, key)
        is_held = row.state not in TERMINAL_TASK_STATES and row.state != "running"
        why = await redact(caller, conn, await explain_row(conn, row, run_id=run_id)) if is_held else None
        shown = await _tab(conn, run, row, key, tab)
        note = await listings.note(conn, **key._asdict())
        is_deferred = row.state == "deferred"
        polls = await tasks.sensor_polls(conn, key)
        asked = await waits.of_task(conn, run_id=run_id, task=task, map_index=row.map_index) if is_deferred else []
    if caller.principal.may(Permission.READ_LOGS):
        shown |= await _told(caller, key, attempts, tab)
    return page(
        request,
        "task.html",
        here="runs",
        run=run,
        row=row,
        name=full_name(row),
        attempts=attempts,
        why=_sentences(why),
        polls=polls,
        note=note,
        is_asking=any(each.is_open for each in asked),
        is_over=row.state in TERMINAL_TASK_STATES,
        tab=tab.value,
        tabs=[(each.value, each.value.capitalize(), _address(row, each)) for each in TaskTab],
        **shown,
    )


@router.get("/runs/{run_id}/tasks/{task}/log", Permission.READ_LOGS)
async def read_log(
    run_id: RunId,
    task: TaskName,
    caller: Who,
    map_index: MapIndex = -1,
    at: Annotated[str | None, Query(max_length=60)] = None,
    back: bool = False,
    level: Annotated[str | None, Query(pattern="^(warning|error)$")] = None,
    find: Annotated[str | None, Query(min_length=1, max_length=200)] = None,
    count: bool = False,
) -> Response:
    """A window of the task's log, or the number of matching lines after a position, for static/log.js."""
    log_filter = log_view.LogFilter(level=level, find=find)
    place = log_view.read_place(at, otherwise=log_view.END if back else log_view.START)
    async with caller.read() as conn:
        # Read first whether the task has ended: if it has, its log is complete.
        _, row, key = await find_task(caller, conn, run_id, task, map_index)
        # Read the log sizes before the window: a stream that starts at them may repeat lines, but misses none.
        sizes = [] if count else await logs.sizes(conn, key)
    if count:
        counted = await log_view.count_onward(caller.log_reader, key, place, log_filter)
        document = {"hits": counted.hits, "next": str(counted.next), "is_end": counted.is_end}
        return JSONResponse(document, headers={"Cache-Control": "no-store"})
    window = await (log_view.read_backward if back else log_view.read_onward)(caller.log_reader, key, place, log_filter)
    document = {
        "lines": _lines(window),
        "first": str(window.first),
        "next": str(window.next),
        "is_start": window.is_start,
        "is_end": window.is_end,
        "is_over": row.state in TERMINAL_TASK_STATES,
        "sizes": sizes,
    }
    return JSONResponse(document, headers={"Cache-Control": "no-store"})


async def find_task(
    caller: ApiCaller, conn: AsyncConnection, run_id: int, task: str, map_index: int
) -> tuple[RunRow, TaskRow, TaskKey]:
    run = await find_run(caller, conn, run_id)
    for row in await tasks.by_name(conn, run_id=run_id, task=task):
        if row.map_index == map_index:
            return run, row, TaskKey(run_id, row.idx, row.map_index)
    raise _missing(run, task)


async def _tab(conn: AsyncConnection, run: RunRow, row: TaskRow, key: TaskKey, tab: TaskTab) -> dict[str, Any]:
    match tab:
        case TaskTab.LOG:
            return {"tail": []}
        case TaskTab.ATTEMPTS:
            journal = await runs.journal(conn, run_id=run.run_id)
            mine = [each for each in journal if concerns(each, task=row.task, idx=row.idx, map_index=row.map_index)]
            return {"events": of_task(await tasks.attempts(conn, key), mine)}
        case TaskTab.RESULT:
            result = await tasks.result(conn, key)
            return {"results": outputs_of(result), "longest": _LONGEST_RESULT}
        case TaskTab.DETAILS:
            return {**await _details(conn, run, row), "rendered": []}


async def _told(caller: ApiCaller, key: TaskKey, attempts: Sequence[AttemptRow], tab: TaskTab) -> dict[str, Any]:
    """Log content for the tabs that show it. If the log storage is unreachable, the page still renders."""
    try:
        if tab is TaskTab.LOG:
            window = await log_view.read_backward(caller.log_reader, key, log_view.END, log_view.LogFilter())
            return {"tail": [line._replace(text=log_view.plain(line.text)) for _, line in window.lines]}
        if tab is TaskTab.DETAILS:
            return {"rendered": await log_view.rendered_of(caller.log_reader, key, attempts)}
    except StorageUnavailable as error:
        return {"tail": [Line(0, None, "MARK", str(error), False)]} if tab is TaskTab.LOG else {}
    return {}


def outputs_of(result: object) -> list[tuple[str, object]]:
    """The returned value and the named outputs, each with its heading; none without a result."""
    if result is None:
        return []
    if not isinstance(result, dict) or result.get(RESULT_TAG) != "outputs":
        return [("Result", result)]
    returned = [] if result.get("value") is None else [("Result", result["value"])]
    return [*returned, *((f"Output {name}", value) for name, value in (result.get("named") or {}).items())]


async def _details(conn: AsyncConnection, run: RunRow, row: TaskRow) -> dict[str, Any]:
    version = await dags.version(conn, run.version_id)
    raw: Any = [] if version is None else version.spec["tasks"]
    edges = [] if version is None else edges_of(version.spec)
    names = [str(each["name"]) for each in raw]
    return {
        "spec": raw[row.idx] if row.idx < len(raw) else {},
        "before": [names[src] for src, dst in edges if dst == row.idx],
        "after": [names[dst] for src, dst in edges if src == row.idx],
    }


def _lines(window: log_view.Window) -> list[dict[str, Any]]:
    return [
        {
            "place": str(place),
            "at": line.at.isoformat() if line.at else None,
            "level": line.level,
            "text": line.text,
            "is_late": line.is_late,
        }
        for place, line in window.lines
    ]


def _sentences(found: Explained | None) -> list[tuple[str, str, list[str]]]:
    """The task with its reasons, then the upstream task that it waits for with its reasons, and so on."""
    chain = []
    while found is not None:
        chain.append((found.task, found.state, [describe(reason) for reason in found.reasons]))
        found = found.upstream
    return chain


def _address(row: TaskRow, tab: TaskTab) -> str:
    return f"?tab={tab}" + (f"&map_index={row.map_index}" if row.map_index >= 0 else "")


def _missing(run: RunRow, task: str) -> NotFound:
    return NotFound(f"Run {run.run_id} of {run.dag} has no task {task[:200]!r}.")
