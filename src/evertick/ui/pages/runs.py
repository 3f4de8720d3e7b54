"""One run with its tasks, and its actions: cancel, clear, mark, delete, notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from fastapi.responses import JSONResponse
from psycopg import AsyncConnection

from evertick.api.context import ApiCaller, Who
from evertick.db.queries import assets, dags, listings, overview, requests, runs, schedules, shards, tasks
from evertick.db.queries.runs import RunRow
from evertick.db.queries.tasks import InstanceCount
from evertick.domain.access import Permission
from evertick.domain.errors import UserError
from evertick.domain.schedules.dependencies import Source, in_words
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES, TaskState
from evertick.engine.runs import of_run, write_note
from evertick.engine.tasks import MARKABLE, full_name
from evertick.operations import runs as operations
from evertick.operations.paging import Cursor, encode_cursor, read_cursor
from evertick.operations.runs import MARKED_RUN, CancelRequest, ClearRequest, RunId, find_run
from evertick.operations.task_logs import RunLogCursor, RunLogLine, read_run_log
from evertick.operations.tasks import MarkRequest, small
from evertick.operations.tasks import mark_task as mark
from evertick.ui.charts import gantt
from evertick.ui.charts.graph import MOST_TASKS, edges_of, graph_of, node_states
from evertick.ui.charts.grid import PRECEDENCE, shown_state
from evertick.ui.charts.history import events_of_run
from evertick.ui.layout import Form, done, page, page_router, segment
from evertick.ui.log_view import plain
from evertick.ui.pages.task import MapIndex, TaskName, find_task

router = page_router()


TASKS_SHOWN = 200


_LINES_SHOWN = 1000


_MOST_ROWS = 2000


class RunTab(StrEnum):
    TASKS = "tasks"
    GRAPH = "graph"
    GANTT = "gantt"
    LOG = "log"
    HISTORY = "history"


@router.get("/runs/{run_id}", Permission.READ_RUNS)
async def show_run(
    request: Request,
    run_id: RunId,
    caller: Who,
    tab: RunTab = RunTab.TASKS,
    state: TaskState | None = None,
    task: Annotated[str, Query(max_length=1000)] = "",
    cursor: Cursor = None,
    at: RunLogCursor = None,
) -> Response:
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        counts = await tasks.count_by_state(conn, run_id=run_id)
        note = await listings.note(conn, **of_run(run_id)._asdict())
        start_at = await requests.start_of_run(conn, run_id=run_id)
        causes = await schedules.causes(conn, run_id) if run.kind == "scheduled" else []
        partition = await assets.partition_of_run(conn, run_id)
        shown = await _tab(conn, run, tab, state, task, cursor)
    has_log = caller.principal.may(Permission.READ_LOGS)
    if tab is RunTab.LOG:
        shown |= await _log(caller, run_id, at) if has_log else {"lines": [], "next_at": None, "is_cut": False}
    return page(
        request,
        "run.html",
        here="runs",
        run=run,
        note=note,
        start_at=start_at,
        partition=partition,
        causes=[(in_words(Source(each.kind, each.name)), each) for each in causes],
        is_open=run.state not in TERMINAL_RUN_STATES,
        counts=[(each, counts[each]) for each in reversed(PRECEDENCE) if counts.get(each)],
        total=sum(counts.values()),
        tab=tab.value,
        tabs=[
            (each.value, each.value.capitalize(), f"/runs/{run_id}?tab={each}")
            for each in RunTab
            if has_log or each is not RunTab.LOG
        ],
        state_filter=state,
        **shown,
    )


@router.get("/runs/{run_id}/states", Permission.READ_RUNS)
async def states(run_id: RunId, caller: Who) -> Response:
    """The current states of the nodes of the run's graph."""
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        version = await dags.version(conn, run.version_id)
        found = await overview.states_of_run(conn, run_id=run_id, limit=20 * MOST_TASKS)
    raw: Any = [] if version is None else version.spec["tasks"]
    shown = node_states([str(task["name"]) for task in raw], found, is_run=True)
    return JSONResponse({str(idx): asdict(each) for idx, each in shown.items()}, headers={"Cache-Control": "no-store"})


async def _tab(
    conn: AsyncConnection, run: RunRow, tab: RunTab, state: TaskState | None, task: str, cursor: str | None
) -> dict[str, Any]:
    match tab:
        case RunTab.TASKS:
            return await _tasks(conn, run.run_id, state, cursor)
        case RunTab.GRAPH:
            return {"graph": await graph_of(conn, version_id=run.version_id, run_id=run.run_id)}
        case RunTab.GANTT:
            return {"chart": await _gantt(conn, run, task), "unfolded": task}
        case RunTab.LOG:
            return {}
        case RunTab.HISTORY:
            rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
            attempts = await overview.attempts_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
            journal = await runs.journal(conn, run_id=run.run_id)
            return {"events": events_of_run(run, attempts, journal, {row.idx: row.task for row in rows})}


async def _tasks(conn: AsyncConnection, run_id: int, state: TaskState | None, cursor: str | None) -> dict[str, Any]:
    idx, map_index = read_cursor(cursor, -1, -1)
    if state is None:
        rows = await tasks.folded_page_of_run(conn, run_id=run_id, idx=small(idx), limit=TASKS_SHOWN)
        is_mapped = any(row.map_index >= 0 for row in rows)
        folded = folded_of(await tasks.instances_of_run(conn, run_id=run_id)) if is_mapped else {}
        is_more = len(rows) == TASKS_SHOWN
        return {"rows": rows, "folded": folded, "next_cursor": encode_cursor(rows[-1].idx, -1) if is_more else None}
    found = await tasks.page_of_run(
        conn, run_id=run_id, idx=small(idx), map_index=small(map_index), state=state, limit=TASKS_SHOWN
    )
    is_more = len(found) == TASKS_SHOWN
    return {
        "rows": found,
        "folded": {},
        "next_cursor": encode_cursor(found[-1].idx, found[-1].map_index) if is_more else None,
    }


async def _log(caller: ApiCaller, run_id: int, at: str | None) -> dict[str, Any]:
    """The lines of all tasks by time, each with the address of its task; `next_at` is the place of the lines that follow."""
    found: list[RunLogLine] = []
    is_cut = True
    while is_cut and len(found) < _LINES_SHOWN:
        part = await read_run_log(caller, run_id=run_id, cursor=at)
        found += part.lines
        is_cut, at = not part.is_complete and part.next_cursor != at, part.next_cursor
    lines = [(replace(each, text=plain(each.text)), _task_address(run_id, each.task)) for each in found]
    return {"lines": lines, "next_at": at, "is_cut": is_cut}


def _task_address(run_id: int, name: str) -> str:
    task, _, index = name.removesuffix("]").partition("[") if name.endswith("]") else (name, "", "")
    return f"/runs/{run_id}/tasks/{segment(task)}" + (f"?map_index={index}" if index else "")


@dataclass(frozen=True, slots=True)
class FoldedTask:
    """A mapped task as one row. `state` needs the most attention; `finished_at` is None while an instance is open."""

    state: str
    counts: dict[str, int]
    started_at: datetime | None
    finished_at: datetime | None


def folded_of(counts: Sequence[InstanceCount]) -> dict[int, FoldedTask]:
    """The mapped tasks by index."""
    found: dict[int, list[InstanceCount]] = defaultdict(list)
    for each in counts:
        found[each.idx].append(each)
    return {idx: _folded(parts) for idx, parts in found.items()}


def _folded(parts: Sequence[InstanceCount]) -> FoldedTask:
    counts = {each.state: each.instances for each in parts}
    ends = [each.finished_at for each in parts]
    return FoldedTask(
        state=shown_state(counts),
        counts={state: counts[state] for state in PRECEDENCE if state in counts},
        started_at=min((each.started_at for each in parts if each.started_at), default=None),
        finished_at=max(filter(None, ends)) if counts.keys() <= TERMINAL_TASK_STATES and any(ends) else None,
    )


async def _gantt(conn: AsyncConnection, run: RunRow, task: str) -> gantt.Gantt:
    rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
    attempts = await overview.attempts_of_run(conn, run_id=run.run_id, limit=4 * _MOST_ROWS)
    version = await dags.version(conn, run.version_id)
    now = await shards.read_clock(conn)
    return gantt.draw(
        rows,
        attempts,
        edges_of(version.spec) if version else [],
        open_tasks=await overview.open_tasks_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS),
        begin=run.started_at or run.created_at,
        now=run.finished_at or now,
        unfolded=task or None,
    )


_LONGEST_REASON = 1000


NamedTask = Annotated[str, Query(max_length=1100)]


@router.post("/runs/{run_id}/cancel", Permission.CANCEL_RUNS)
async def cancel_run(run_id: RunId, form: Form, caller: Who) -> Response:
    reason = form.get("reason", "").strip()
    if len(reason) > _LONGEST_REASON:
        raise UserError(f"The reason is too long: the limit is {_LONGEST_REASON} characters.")
    stopping = (await operations.cancel_run(caller, run_id=run_id, body=CancelRequest(reason=reason or None))).stopping
    return done(f"Run {run_id} canceled" + (f"; stopping {_chosen_tasks(stopping)}." if stopping else "."))


@router.get("/runs/{run_id}/clear", Permission.CLEAR_TASKS)
async def preview_clear(
    run_id: RunId,
    request: Request,
    caller: Who,
    task: NamedTask = "",
    which: Annotated[str, Query(pattern="^(all|failed|named)$")] = "all",
    downstream: bool = False,
) -> Response:
    """Preview the tasks that a clear runs again, as a fragment of the dialog."""
    wanted = replace(_cleared(which, task), with_downstream=downstream, is_preview=True)
    affected = (await operations.clear_run(caller, run_id=run_id, body=wanted)).tasks
    running = sum(row.state in ("running", "queued") for row in affected)
    return page(request, "clear_preview.html", affected=affected, running=running, full_name=full_name)


@router.post("/runs/{run_id}/clear", Permission.CLEAR_TASKS)
async def clear_run(run_id: RunId, form: Form, caller: Who) -> Response:
    which, task = form.get("which", ""), form.get("task", "")
    if which not in ("all", "failed", "named") or (which == "named" and not task):
        raise UserError("Choose which tasks to run again.")
    wanted = replace(_cleared(which, task), with_downstream=form.get("downstream") == "true")
    cleared = await operations.clear_run(caller, run_id=run_id, body=wanted)
    if not cleared.tasks:
        raise UserError("Nothing to clear: none of these tasks has run.")
    stopped = f"; stopping {_chosen_tasks(cleared.stopping)} first" if cleared.stopping else ""
    return done(f"{_chosen_tasks(len(cleared.tasks))} of run {run_id} cleared{stopped}.")


def _cleared(which: str, task: str) -> ClearRequest:
    return ClearRequest(tasks=[task] if which == "named" else [], only_failed=which == "failed")


@router.post("/runs/{run_id}/mark", Permission.MARK_TASKS)
async def mark_run(run_id: RunId, form: Form, caller: Who) -> Response:
    state = form.get("state", "")
    if state not in MARKED_RUN:
        raise UserError("Choose a state to mark the run with: success or failed.")
    marked = await operations.mark_run(caller, run_id=run_id, state=TaskState(state))
    return done(f"{_chosen_tasks(marked)} of run {run_id} marked {state}.")


@router.post("/runs/{run_id}/delete", Permission.DELETE_RUNS)
async def delete_run(run_id: RunId, caller: Who) -> Response:
    dag = await operations.delete_run(caller, run_id=run_id)
    return done(f"Run {run_id} of {dag} deleted.", go="/runs?" + urlencode({"dag": dag}))


@router.get("/runs/{run_id}/tasks/{task}/mark", Permission.MARK_TASKS)
async def preview_mark(
    run_id: RunId, task: TaskName, request: Request, caller: Who, map_index: MapIndex = -1
) -> Response:
    """Preview the downstream tasks that would be decided again, as a fragment of the dialog."""
    async with caller.read() as conn:
        run, row, _ = await find_task(caller, conn, run_id, task, map_index)
        below = set(await tasks.downstream(conn, version_id=run.version_id, idxs=[row.idx]))
        rows = await tasks.list_of_run(conn, run_id=run_id)
    return page(request, "mark_preview.html", row=row, below=[each for each in rows if each.idx in below])


@router.post("/runs/{run_id}/tasks/{task}/mark", Permission.MARK_TASKS)
async def mark_task(run_id: RunId, task: TaskName, form: Form, caller: Who) -> Response:
    state = form.get("state", "")
    if state not in MARKABLE:
        raise UserError(f"Choose a state to mark the task with: {', '.join(MARKABLE)}.")
    try:
        map_index = int(form.get("map_index", "-1"))
    except ValueError:
        raise UserError("map_index must be a whole number.") from None
    marked = await mark(caller, run_id=run_id, task=task, body=MarkRequest(state=TaskState(state), map_index=map_index))
    then = "marked" if marked.outcome == "marked" else "is stopping and will be marked"
    return done(f"{task} of run {run_id} {then} {state}.")


def _chosen_tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


@router.post("/runs/{run_id}/note", Permission.MARK_TASKS)
async def note_run(run_id: RunId, form: Form, caller: Who) -> Response:
    content = _content(form)
    async with caller.write() as conn:
        await find_run(caller, conn, run_id)
        await write_note(conn, of_run(run_id), content=content, actor=caller.actor)
    return _told(content)


@router.post("/runs/{run_id}/tasks/{task}/note", Permission.MARK_TASKS)
async def note_task(run_id: RunId, task: TaskName, form: Form, caller: Who, map_index: MapIndex = -1) -> Response:
    content = _content(form)
    async with caller.write() as conn:
        _, _, key = await find_task(caller, conn, run_id, task, map_index)
        await write_note(conn, key, content=content, actor=caller.actor)
    return _told(content)


def _content(form: dict[str, str]) -> str | None:
    """The submitted note, or None if it is blank. Browsers send CR LF line ends, which are normalized."""
    return form.get("content", "").replace("\r\n", "\n").strip() or None


def _told(content: str | None) -> Response:
    return done("Note removed." if content is None else "Note saved.")
