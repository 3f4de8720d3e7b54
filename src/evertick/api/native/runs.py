"""Runs: listing, reading, waiting, canceling, and clearing with a look before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Query
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Caller, Who
from evertick.api.log_follow import is_still_valid
from evertick.api.native.documents import Run, run_of
from evertick.api.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.notify import Channel
from evertick.db.queries import dags, notifications, runs, schedules, tasks
from evertick.db.queries.notifications import QuarantinedRow
from evertick.db.queries.runs import JournalEntry, RunRow
from evertick.db.queries.schedules import RunTrigger
from evertick.db.queries.tasks import TaskRow
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, Unauthenticated
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES, RunState, TaskState
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, newest_version, select_cleared

router = APIRouter(route_class=GuardedRoute, tags=["runs"])

# Of the runs before the cursor a filter looks at so many at once: some milliseconds, whatever the state that is asked for.
WINDOW = 5000
LONGEST_WAIT_SECONDS = 60.0
_LOOK_SECONDS = 0.25
AFFECTED = TERMINAL_TASK_STATES | {TaskState.QUEUED, TaskState.RUNNING}

RunId = Annotated[int, Path(ge=1, le=LARGEST, description="The run's number.")]


@dataclass(slots=True, kw_only=True)
class RunPage(Run):
    """With how many tasks are in each state, what people and repairs did to it, which runs and assets it came after, and
    why it was set aside, if it was."""

    tasks_by_state: dict[str, int]
    journal: list[JournalEntry]
    causes: list[RunTrigger]
    quarantine: QuarantinedRow | None


class Cancel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reason: Annotated[str, Field(min_length=1, max_length=1000)] | None = None


class Canceled(BaseModel):
    asked_to_stop: int


class Clear(BaseModel):
    """Which tasks run again: all, those named, or what failed. `is_preview` shows them and changes nothing."""

    model_config = ConfigDict(extra="forbid")
    tasks: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=1000)] = []
    only_failed: bool = False
    with_downstream: bool = False
    run_on_latest_version: bool = False
    is_preview: bool = False


class Cleared(BaseModel):
    tasks: list[TaskRow]
    reopened: int
    asked_to_stop: int


@router.get("/runs")
@requires(Permission.READ_RUNS)
async def list_runs(
    caller: Who,
    dag: Annotated[str | None, Query(max_length=250)] = None,
    state: RunState | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[Run]:
    """Newest first. With a filter a page may be short and still have a next one."""
    (before,) = read_cursor(cursor_text, LARGEST)
    async with caller.reading() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag is not None else await caller.visible(conn)
        found, end = await runs.page(
            conn, before=before, dag_ids=dag_ids, state=state, limit=limit, window=max(WINDOW, limit)
        )
    return Page(items=[run_of(row) for row in found], next_cursor=None if end is None else cursor(end))


@router.get("/latest-runs")
@requires(Permission.READ_RUNS)
async def list_latest_runs(caller: Who, limit: Limit = USUAL_ITEMS, cursor_text: Cursor = None) -> Page[Run]:
    """The newest run of each DAG, in the order of their names."""
    (after,) = read_cursor(cursor_text, "")
    async with caller.reading() as conn:
        dag_ids = await caller.visible(conn)
        found = await runs.newest_of_each_dag(conn, dag_ids=dag_ids, after=after, limit=limit)
    return Page(
        items=[run_of(row) for row in found], next_cursor=cursor(found[-1].dag) if len(found) == limit else None
    )


@router.get("/runs/{run_id}")
@requires(Permission.READ_RUNS)
async def show_run(run_id: RunId, caller: Who) -> RunPage:
    async with caller.reading() as conn:
        row = await find_run(caller, conn, run_id)
        states = await tasks.count_by_state(conn, run_id=run_id)
        journal = await runs.journal(conn, run_id=run_id)
        causes = await schedules.causes(conn, run_id)
        aside = await notifications.find_quarantined(conn, kind="run", subject_id=run_id)
    return RunPage(**asdict(run_of(row)), tasks_by_state=states, journal=journal, causes=causes, quarantine=aside)


@router.get("/runs/{run_id}/wait")
@requires(Permission.READ_RUNS)
async def wait_for_run(
    run_id: RunId, caller: Who, seconds: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS)] = 30.0
) -> Run:
    """The run when it has ended, or as it is when the time is over: look at its state."""
    until = time.monotonic() + seconds
    while True:
        # The connection is given back between two looks: who waits must not keep others from asking.
        async with caller.reading() as conn:
            if not await is_still_valid(caller, conn):
                raise Unauthenticated("This token or session is not valid any more. Sign in again.")
            row = await find_run(caller, conn, run_id)
        if row.state in TERMINAL_RUN_STATES or time.monotonic() >= until:
            return run_of(row)
        await asyncio.sleep(min(_LOOK_SECONDS, max(until - time.monotonic(), 0.0)))


@router.post("/runs/{run_id}/cancel")
@requires(Permission.CANCEL_RUNS)
async def cancel_run(run_id: RunId, caller: Who, how: Cancel | None = None) -> Canceled:
    """What has not started ends now, what runs is asked to stop."""
    async with caller.changing(Channel.STOP, Channel.READY) as conn:
        await find_run(caller, conn, run_id)
        asked = await cancel(conn, run_id=run_id, actor=caller.actor, reason=how.reason if how else None)
    return Canceled(asked_to_stop=asked)


@router.post("/runs/{run_id}/clear")
@requires(Permission.CLEAR_TASKS)
async def clear_run(run_id: RunId, wanted: Clear, caller: Who) -> Cleared:
    """Run tasks again. What runs is stopped first."""
    async with caller.changing(Channel.READY, Channel.STOP, Channel.PLAN) as conn:
        await find_run(caller, conn, run_id)
        chosen = await select_cleared(
            conn,
            run_id=run_id,
            names=wanted.tasks,
            only_failed=wanted.only_failed,
            with_downstream=wanted.with_downstream,
        )
        affected = [row for row in chosen if row.state in AFFECTED]
        newest = await newest_version(conn, run_id) if wanted.run_on_latest_version else None
        if wanted.is_preview or not affected:
            return Cleared(tasks=affected, reopened=0, asked_to_stop=0)
        version_id = newest.version_id if newest else None
        done = await clear(conn, run_id=run_id, chosen=affected, actor=caller.actor, version_id=version_id)
    return Cleared(tasks=affected, reopened=done.reopened, asked_to_stop=done.asked)


async def find_run(caller: Caller, conn: AsyncConnection, run_id: int) -> RunRow:
    """A run that exists and that the caller may know of; its DAG may be deleted by now."""
    row = await runs.find(conn, run_id)
    if row is not None and caller.principal.tags is not None:
        dag = await dags.find(conn, row.dag)
        row = row if dag is not None and caller.sees(dag) else None
    if row is None:
        raise NotFound(f"There is no run {run_id}.")
    return row
