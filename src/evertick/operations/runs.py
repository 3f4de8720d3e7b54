"""Runs: list, show, wait, cancel, and clear."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import dags, notifications, runs, schedules, tasks
from evertick.db.queries.notifications import QuarantinedRow
from evertick.db.queries.runs import JournalEntry, RunRow
from evertick.db.queries.schedules import RunTrigger
from evertick.db.queries.tasks import TaskRow
from evertick.domain.errors import NotFound, Unauthenticated
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES, RunState, TaskState
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, newest_version, select_cleared
from evertick.operations.caller import Caller, is_still_valid
from evertick.operations.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, encode_cursor, read_cursor

# The number of runs that one page with a filter searches: some milliseconds, whatever the filter matches.
WINDOW = 5000
LONGEST_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.25
AFFECTED = TERMINAL_TASK_STATES | {TaskState.QUEUED, TaskState.RUNNING}

RunId = Annotated[int, Ge(1), Le(LARGEST), Doc("The run's number.")]
DagFilter = Annotated[str | None, MaxLen(250), Doc("Only runs of this DAG.")]


# Not a pydantic model: lists of runs are what clients poll, and a model takes five times as long to make.
@dataclass(slots=True, kw_only=True)
class Run:
    run_id: int
    dag: str
    version: int
    kind: str
    key: str | None
    fire_at: datetime | None
    params: dict[str, Any]
    triggered_by: str
    created_at: datetime
    state: str
    is_canceling: bool
    open_tasks: int
    task_count: int
    retried: int
    started_at: datetime | None
    finished_at: datetime | None
    reason: str | None


@dataclass(slots=True, kw_only=True)
class RunPage(Run):
    """A run with the number of tasks in each state, what operators and repairs did to it, the runs and assets that
    triggered it, and why it is quarantined, if it is."""

    tasks_by_state: dict[str, int]
    journal: list[JournalEntry]
    causes: list[RunTrigger]
    quarantine: QuarantinedRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    reason: Annotated[str, MinLen(1), MaxLen(1000)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Canceled:
    asked_to_stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Which tasks run again: all tasks, named tasks, or failed tasks. `is_preview` lists them and changes nothing."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    tasks: Annotated[Sequence[Annotated[str, MaxLen(1000)]], MaxLen(1000)] = ()
    only_failed: bool = False
    with_downstream: bool = False
    run_on_latest_version: bool = False
    is_preview: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionChange:
    """The version that a run began with, and the version that a clear moves it to."""

    old: int
    new: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """`version_change` is set if the run continues on another version of its DAG."""

    tasks: list[TaskRow]
    reopened: int
    asked_to_stop: int
    version_change: VersionChange | None = None


async def list_runs(
    caller: Caller,
    *,
    dag: DagFilter = None,
    state: RunState | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Run]:
    """List runs, newest first. With a filter a page may be short and still have a successor."""
    (before,) = read_cursor(cursor, LARGEST)
    async with caller.read() as conn:
        # The history of a deleted DAG remains.
        known = await caller.known_dag(conn, dag) if dag is not None else None
        dag_ids = [known.dag_id] if known is not None else await caller.visible_dag_ids(conn)
        found, end = await runs.page(
            conn, before=before, dag_ids=dag_ids, state=state, limit=limit, window=max(WINDOW, limit)
        )
    return Page(items=[run_of(row) for row in found], next_cursor=None if end is None else encode_cursor(end))


async def list_latest_runs(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Run]:
    """List the newest run of each DAG, ordered by the DAG's name."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        dag_ids = await caller.visible_dag_ids(conn)
        found = await runs.newest_of_each_dag(conn, dag_ids=dag_ids, after=after, limit=limit)
    next_cursor = encode_cursor(found[-1].dag) if len(found) == limit else None
    return Page(items=[run_of(row) for row in found], next_cursor=next_cursor)


async def show_run(caller: Caller, *, run_id: RunId) -> RunPage:
    """Show one run with its history."""
    async with caller.read() as conn:
        row = await find_run(caller, conn, run_id)
        states = await tasks.count_by_state(conn, run_id=run_id)
        journal = await runs.journal(conn, run_id=run_id)
        causes = await schedules.causes(conn, run_id)
        aside = await notifications.find_quarantined(conn, kind="run", subject_id=run_id)
    return RunPage(**asdict(run_of(row)), tasks_by_state=states, journal=journal, causes=causes, quarantine=aside)


async def wait_for_run(
    caller: Caller,
    *,
    run_id: RunId,
    seconds: Annotated[float, Ge(0), Le(LONGEST_WAIT_SECONDS), Doc("Longest time to wait.")] = 30.0,
) -> Run:
    """Wait until the run has ended, for at most `seconds`. Check the state of the run that is returned."""
    until = time.monotonic() + seconds
    while True:
        # The connection is returned between two polls, so that a waiting caller does not block others.
        async with caller.read() as conn:
            if not await is_still_valid(caller, conn):
                raise Unauthenticated("This token or session is no longer valid. Sign in again.")
            row = await find_run(caller, conn, run_id)
        if row.state in TERMINAL_RUN_STATES or time.monotonic() >= until:
            return run_of(row)
        await asyncio.sleep(min(_POLL_SECONDS, max(until - time.monotonic(), 0.0)))


async def cancel_run(caller: Caller, *, run_id: RunId, body: Cancel | None = None) -> Canceled:
    """Cancel a run. Tasks that have not started end now; running tasks are asked to stop."""
    async with caller.write(Channel.STOP, Channel.TASKS) as conn:
        await find_run(caller, conn, run_id)
        asked = await cancel(conn, run_id=run_id, actor=caller.actor, reason=body.reason if body else None)
    return Canceled(asked_to_stop=asked)


async def clear_run(caller: Caller, *, run_id: RunId, body: Clear) -> Cleared:
    """Run tasks again. Running tasks are stopped first."""
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        await find_run(caller, conn, run_id)
        chosen = await select_cleared(
            conn, run_id=run_id, names=body.tasks, only_failed=body.only_failed, with_downstream=body.with_downstream
        )
        affected = [row for row in chosen if row.state in AFFECTED]
        newest = await newest_version(conn, run_id) if body.run_on_latest_version else None
        version_id = newest.version_id if newest else None
        change = VersionChange(old=newest.run_number, new=newest.number) if newest and version_id else None
        if body.is_preview or not affected:
            return Cleared(tasks=affected, reopened=0, asked_to_stop=0, version_change=change)
        done = await clear(conn, run_id=run_id, chosen=chosen, actor=caller.actor, version_id=version_id)
    return Cleared(tasks=affected, reopened=done.reopened, asked_to_stop=done.asked, version_change=change)


async def find_run(caller: Caller, conn: AsyncConnection, run_id: int) -> RunRow:
    """A run that exists and that the caller may see; its DAG may be deleted by now."""
    row = await runs.find(conn, run_id)
    if row is not None and caller.principal.tags is not None:
        dag = await dags.find(conn, row.dag)
        row = row if dag is not None and caller.sees(dag) else None
    if row is None:
        raise NotFound(f"There is no run {run_id}. List runs with `evertick runs list`.")
    return row


def run_of(row: RunRow) -> Run:
    return Run(
        run_id=row.run_id,
        dag=row.dag,
        version=row.version,
        kind=row.kind,
        key=row.key,
        fire_at=row.fire_at,
        params=row.params,
        triggered_by=row.triggered_by,
        created_at=row.created_at,
        state=row.state,
        is_canceling=row.cancel_requested and row.finished_at is None,
        open_tasks=row.open_tasks,
        task_count=row.task_count,
        retried=row.retried,
        started_at=row.started_at,
        finished_at=row.finished_at,
        reason=row.reason,
    )
