"""Runs of all DAGs, newest first; one run with its tasks; and its actions: cancel, clear, mark, notes."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from psycopg import AsyncConnection

from evertick.api.auth import requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.db.queries import dags, listings, overview, runs, schedules, shards, tasks
from evertick.db.queries.runs import RunRow
from evertick.domain.access import Permission
from evertick.domain.errors import UserError
from evertick.domain.schedules.dependencies import Source, in_words
from evertick.domain.states import TERMINAL_RUN_STATES, RunState, TaskState
from evertick.engine.runs import cancel, of_run, write_note
from evertick.engine.runs import of_run as of_whole_run
from evertick.engine.tasks import MARKABLE, clear, full_name, mark, select_cleared
from evertick.operations.paging import LARGEST, Cursor, encode_cursor, read_cursor
from evertick.operations.runs import AFFECTED, WINDOW, RunId, find_run
from evertick.operations.tasks import small
from evertick.ui.charts import gantt
from evertick.ui.charts.graph import MOST_TASKS, WORST_FIRST, edges_of, graph_of, node_states
from evertick.ui.charts.history import events_of_run
from evertick.ui.layout import PageRoute, done, form_of, page
from evertick.ui.pages.task import MapIndex, TaskName, find_task

router = APIRouter(route_class=PageRoute, include_in_schema=False)


TASKS_SHOWN = 200


BARS_SHOWN = 500


_MOST_ROWS = 2000


class Tab(StrEnum):
    TASKS = "tasks"
    GRAPH = "graph"
    GANTT = "gantt"
    HISTORY = "history"


@router.get("/runs/{run_id}")
@requires(Permission.READ_RUNS)
async def show_run(
    request: Request,
    run_id: RunId,
    caller: Who,
    tab: Tab = Tab.TASKS,
    state: TaskState | None = None,
    cursor: Cursor = None,
) -> Response:
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        counts = await tasks.count_by_state(conn, run_id=run_id)
        note = await listings.note(conn, **of_whole_run(run_id)._asdict())
        causes = await schedules.causes(conn, run_id) if run.kind == "scheduled" else []
        shown = await _tab(conn, run, tab, state, cursor)
    return page(
        request,
        "run.html",
        here="runs",
        run=run,
        note=note,
        causes=[(in_words(Source(each.kind, each.name)), each) for each in causes],
        is_open=run.state not in TERMINAL_RUN_STATES,
        counts=[(each, counts[each]) for each in reversed(WORST_FIRST) if counts.get(each)],
        total=sum(counts.values()),
        tab=tab.value,
        tabs=[(each.value, each.value.capitalize(), f"/runs/{run_id}?tab={each}") for each in Tab],
        state_filter=state,
        **shown,
    )


@router.get("/runs/{run_id}/states")
@requires(Permission.READ_RUNS)
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
    conn: AsyncConnection, run: RunRow, tab: Tab, state: TaskState | None, cursor: str | None
) -> dict[str, Any]:
    match tab:
        case Tab.TASKS:
            return await _tasks(conn, run.run_id, state, cursor)
        case Tab.GRAPH:
            return {"graph": await graph_of(conn, version_id=run.version_id, run_id=run.run_id)}
        case Tab.GANTT:
            return {"chart": await _gantt(conn, run)}
        case Tab.HISTORY:
            rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
            attempts = await overview.attempts_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
            journal = await runs.journal(conn, run_id=run.run_id)
            return {"events": events_of_run(run, attempts, journal, {row.idx: row.task for row in rows})}


async def _tasks(conn: AsyncConnection, run_id: int, state: TaskState | None, cursor: str | None) -> dict[str, Any]:
    idx, map_index = read_cursor(cursor, -1, -1)
    found = await tasks.page_of_run(
        conn, run_id=run_id, after=(small(idx), small(map_index)), state=state, limit=TASKS_SHOWN
    )
    is_more = len(found) == TASKS_SHOWN
    return {"rows": found, "next_cursor": encode_cursor(found[-1].idx, found[-1].map_index) if is_more else None}


async def _gantt(conn: AsyncConnection, run: RunRow) -> gantt.Gantt:
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
        most=BARS_SHOWN,
    )


_SHOWN = 50


@router.get("/runs")
@requires(Permission.READ_RUNS)
async def list_runs(
    request: Request,
    caller: Who,
    dag: Annotated[str, Query(max_length=250)] = "",
    state: Annotated[str, Query(max_length=20)] = "",
    cursor: Cursor = None,
) -> Response:
    (before,) = read_cursor(cursor, LARGEST)
    wanted = RunState(state) if state in set(RunState) else None
    async with caller.read() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag else await caller.visible_dag_ids(conn)
        found, end = await runs.page(conn, before=before, dag_ids=dag_ids, state=wanted, limit=_SHOWN, window=WINDOW)
    return page(
        request,
        "runs.html",
        here="runs",
        rows=found,
        dag=dag,
        state_filter=wanted,
        states=list(RunState),
        is_first=cursor is None,
        next_cursor=None if end is None else encode_cursor(end),
    )


_LONGEST_REASON = 1000


NamedTask = Annotated[str, Query(max_length=1100)]


@router.post("/runs/{run_id}/cancel")
@requires(Permission.CANCEL_RUNS)
async def cancel_run(run_id: RunId, request: Request, caller: Who) -> Response:
    reason = (await form_of(request)).get("reason", "").strip()
    if len(reason) > _LONGEST_REASON:
        raise UserError(f"The reason is too long: the limit is {_LONGEST_REASON} characters.")
    async with caller.write(Channel.STOP, Channel.TASKS) as conn:
        await find_run(caller, conn, run_id)
        asked = await cancel(conn, run_id=run_id, actor=caller.actor, reason=reason or None)
    return done(f"Run {run_id} canceled" + (f"; stopping {_chosen_tasks(asked)}." if asked else "."))


@router.get("/runs/{run_id}/clear")
@requires(Permission.CLEAR_TASKS)
async def preview_clear(
    run_id: RunId,
    request: Request,
    caller: Who,
    task: NamedTask = "",
    which: Annotated[str, Query(pattern="^(all|failed|named)$")] = "all",
    downstream: bool = False,
) -> Response:
    """Preview the tasks that a clear runs again, as a fragment of the dialog."""
    async with caller.read() as conn:
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
@requires(Permission.CLEAR_TASKS)
async def clear_run(run_id: RunId, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    which, task = form.get("which", ""), form.get("task", "")
    if which not in ("all", "failed", "named") or (which == "named" and not task):
        raise UserError("Choose which tasks to run again.")
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
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
    stopped = f"; stopping {_chosen_tasks(cleared.asked)} first" if cleared.asked else ""
    return done(f"{_chosen_tasks(len(affected))} of run {run_id} cleared{stopped}.")


@router.get("/runs/{run_id}/tasks/{task}/mark")
@requires(Permission.MARK_TASKS)
async def preview_mark(
    run_id: RunId, task: TaskName, request: Request, caller: Who, map_index: MapIndex = -1
) -> Response:
    """Preview the downstream tasks that would be decided again, as a fragment of the dialog."""
    async with caller.read() as conn:
        run, row, _ = await find_task(caller, conn, run_id, task, map_index)
        below = set(await tasks.downstream(conn, version_id=run.version_id, idxs=[row.idx]))
        rows = await tasks.list_of_run(conn, run_id=run_id)
    return page(request, "mark_preview.html", row=row, below=[each for each in rows if each.idx in below])


@router.post("/runs/{run_id}/tasks/{task}/mark")
@requires(Permission.MARK_TASKS)
async def mark_task(run_id: RunId, task: TaskName, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    state = form.get("state", "")
    if state not in MARKABLE:
        raise UserError(f"Choose a state to mark the task with: {', '.join(MARKABLE)}.")
    try:
        map_index = int(form.get("map_index", "-1"))
    except ValueError:
        raise UserError("map_index must be a whole number.") from None
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        _, _, key = await find_task(caller, conn, run_id, task, map_index)
        outcome = await mark(conn, key, state=state, actor=caller.actor)
    then = "marked" if outcome == "marked" else "is stopping and will be marked"
    return done(f"{task} of run {run_id} {then} {state}.")


def _chosen_tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


@router.post("/runs/{run_id}/note")
@requires(Permission.MARK_TASKS)
async def note_run(run_id: RunId, request: Request, caller: Who) -> Response:
    content = await _content(request)
    async with caller.write() as conn:
        await find_run(caller, conn, run_id)
        await write_note(conn, of_run(run_id), content=content, actor=caller.actor)
    return _told(content)


@router.post("/runs/{run_id}/tasks/{task}/note")
@requires(Permission.MARK_TASKS)
async def note_task(run_id: RunId, task: TaskName, request: Request, caller: Who, map_index: MapIndex = -1) -> Response:
    content = await _content(request)
    async with caller.write() as conn:
        _, _, key = await find_task(caller, conn, run_id, task, map_index)
        await write_note(conn, key, content=content, actor=caller.actor)
    return _told(content)


async def _content(request: Request) -> str | None:
    """The submitted note, or None if it is blank. Browsers send CR LF line ends, which are normalized."""
    return (await form_of(request)).get("content", "").replace("\r\n", "\n").strip() or None


def _told(content: str | None) -> Response:
    return done("Note removed." if content is None else "Note saved.")
