"""One run: state, tasks, graph, Gantt chart and history."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from psycopg import AsyncConnection

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.native.runs import RunId, find_run
from evertick.api.paging import Cursor, cursor, read_cursor
from evertick.domain.access import Permission
from evertick.domain.after import Source, in_words
from evertick.domain.states import TERMINAL_RUN_STATES, TaskState
from evertick.engine.write_note import of_run as of_whole_run
from evertick.store import charts, dags, listing, runs, schedules, shards, tasks
from evertick.store.runs import RunRow
from evertick.ui import gantt
from evertick.ui.frame import PageRoute, page
from evertick.ui.graph import MOST_TASKS, WORST_FIRST, edges_of, graph_of, node_states
from evertick.ui.history import of_run

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
@needs(Permission.READ_RUNS)
async def show_run(
    request: Request,
    run_id: RunId,
    caller: Who,
    tab: Tab = Tab.TASKS,
    state: TaskState | None = None,
    cursor_text: Cursor = None,
) -> Response:
    async with caller.reading() as conn:
        run = await find_run(caller, conn, run_id)
        counts = await tasks.count_by_state(conn, run_id=run_id)
        note = await listing.note(conn, **of_whole_run(run_id)._asdict())
        causes = await schedules.causes(conn, run_id) if run.kind == "scheduled" else []
        shown = await _tab(conn, run, tab, state, cursor_text)
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
@needs(Permission.READ_RUNS)
async def states(run_id: RunId, caller: Who) -> Response:
    """The current states of the nodes of the run's graph."""
    async with caller.reading() as conn:
        run = await find_run(caller, conn, run_id)
        version = await dags.version(conn, run.version_id)
        found = await charts.states_of_run(conn, run_id=run_id, limit=20 * MOST_TASKS)
    raw: Any = [] if version is None else version.spec["tasks"]
    shown = node_states([str(task["name"]) for task in raw], found, is_run=True)
    return JSONResponse({str(idx): asdict(each) for idx, each in shown.items()}, headers={"Cache-Control": "no-store"})


async def _tab(
    conn: AsyncConnection, run: RunRow, tab: Tab, state: TaskState | None, cursor_text: str | None
) -> dict[str, Any]:
    match tab:
        case Tab.TASKS:
            return await _tasks(conn, run.run_id, state, cursor_text)
        case Tab.GRAPH:
            return {"graph": await graph_of(conn, version_id=run.version_id, run_id=run.run_id)}
        case Tab.GANTT:
            return {"chart": await _gantt(conn, run)}
        case Tab.HISTORY:
            rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
            attempts = await charts.attempts_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
            journal = await runs.journal(conn, run_id=run.run_id)
            return {"events": of_run(run, attempts, journal, {row.idx: row.task for row in rows})}


async def _tasks(
    conn: AsyncConnection, run_id: int, state: TaskState | None, cursor_text: str | None
) -> dict[str, Any]:
    idx, map_index = read_cursor(cursor_text, -1, -1)
    found = await tasks.page_of_run(
        conn, run_id=run_id, after=(_small(idx), _small(map_index)), state=state, limit=TASKS_SHOWN
    )
    is_more = len(found) == TASKS_SHOWN
    return {"rows": found, "next_cursor": cursor(found[-1].idx, found[-1].map_index) if is_more else None}


async def _gantt(conn: AsyncConnection, run: RunRow) -> gantt.Gantt:
    rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS)
    attempts = await charts.attempts_of_run(conn, run_id=run.run_id, limit=4 * _MOST_ROWS)
    version = await dags.version(conn, run.version_id)
    now = await shards.read_clock(conn)
    return gantt.draw(
        rows,
        attempts,
        edges_of(version.spec) if version else [],
        open_tasks=await charts.open_tasks_of_run(conn, run_id=run.run_id, limit=_MOST_ROWS),
        begin=run.started_at or run.created_at,
        now=run.finished_at or now,
        most=BARS_SHOWN,
    )


def _small(number: int) -> int:
    return max(-(2**31), min(number, 2**31 - 1))
