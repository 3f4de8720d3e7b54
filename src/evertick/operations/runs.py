"""Runs: list, show, wait, cancel, and clear."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import assets, dags, notifications, requests, runs, schedules, tasks
from evertick.db.queries.assets import RunPartition
from evertick.db.queries.notifications import QuarantinedItem
from evertick.db.queries.runs import JournalEntry, RunRow, RunSearch
from evertick.db.queries.schedules import RunTrigger
from evertick.db.queries.tasks import TaskRow
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound, Unauthenticated, UserError
from evertick.domain.schedules.time_zones import with_zone
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES, RunKind, RunState, TaskState
from evertick.engine.runs import cancel
from evertick.engine.runs import delete_run as delete
from evertick.engine.tasks import clear, mark, newest_version, select_tasks
from evertick.operations.caller import Caller, is_still_valid
from evertick.operations.paging import (
    LARGEST,
    USUAL_ITEMS,
    Cursor,
    Limit,
    Page,
    RequestBody,
    encode_cursor,
    like,
    page_of,
    read_cursor,
)

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
class RunDetails(Run):
    """A run with the number of tasks in each state, what operators and repairs did to it, the runs and assets that
    triggered it, the partition that it is for, and why it is quarantined, if it is. `start_at`: when a run that was requested for
    later begins."""

    tasks_by_state: dict[str, int]
    audit: list[JournalEntry]
    triggers: list[RunTrigger]
    partition: RunPartition | None
    quarantine: QuarantinedItem | None
    start_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest(RequestBody):
    reason: Annotated[str, MinLen(1), MaxLen(1000)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    stopping: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearRequest(RequestBody):
    """Which tasks run again: all tasks, named tasks, or failed tasks. `is_preview` lists them and changes nothing."""

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
class ClearResult:
    """`version_change` is set if the run continues on another version of its DAG."""

    tasks: list[TaskRow]
    reopened: int
    stopping: int
    version_change: VersionChange | None = None


async def list_runs(
    caller: Caller,
    *,
    dag: DagFilter = None,
    tag: Annotated[str | None, MaxLen(250), Doc("Only runs of DAGs with this tag.")] = None,
    state: RunState | None = None,
    kind: RunKind | None = None,
    since: Annotated[datetime | None, Doc("Only runs for this time or later.")] = None,
    until: Annotated[datetime | None, Doc("Only runs for a time before this one.")] = None,
    contains: Annotated[str | None, MaxLen(250), Doc("Text in the DAG's name, the key or the parameters.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Run]:
    """List runs, newest first. With a filter a page may be short and still have a successor.

    The time that a run is for is its fire time; for a run without one, it is the time of its creation.
    """
    (before,) = read_cursor(cursor, LARGEST)
    async with caller.read() as conn:
        # The history of a deleted DAG remains.
        dag_ids = (
            [(await caller.known_dag(conn, dag)).dag_id] if dag is not None else await caller.visible_dag_ids(conn)
        )
        if tag is not None:
            tagged = await dags.ids_with_tags(conn, tags=[tag])
            dag_ids = tagged if dag_ids is None else sorted({*tagged} & {*dag_ids})
        wanted = RunSearch(
            dag_ids=dag_ids,
            state=state,
            kind=kind,
            since=since and with_zone(since),
            until=until and with_zone(until),
            like=like(contains),
        )
        found, end = await runs.page(conn, wanted, before=before, limit=limit, window=max(WINDOW, limit))
    return Page(items=[run_of(row) for row in found], next_cursor=None if end is None else encode_cursor(end))


async def list_latest_runs(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[Run]:
    """List the newest run of each DAG, ordered by the DAG's name."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        dag_ids = await caller.visible_dag_ids(conn)
        found = await runs.newest_of_each_dag(conn, dag_ids=dag_ids, after=after, limit=limit)
    return page_of(found, limit, lambda row: (row.dag,), run_of)


async def show_run(caller: Caller, *, run_id: RunId) -> RunDetails:
    """Show one run with its history."""
    async with caller.read() as conn:
        row = await find_run(caller, conn, run_id)
        states = await tasks.count_by_state(conn, run_id=run_id)
        audit = await runs.journal(conn, run_id=run_id)
        triggers = await schedules.causes(conn, run_id)
        start_at = await requests.start_of_run(conn, run_id=run_id)
        partition = await assets.partition_of_run(conn, run_id)
        aside = next(iter(await notifications.list_quarantined(conn, kind="run", subject_id=run_id)), None)
    return RunDetails(
        **asdict(run_of(row)),
        tasks_by_state=states,
        audit=audit,
        triggers=triggers,
        partition=partition,
        quarantine=aside,
        start_at=start_at,
    )


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


async def cancel_run(caller: Caller, *, run_id: RunId, body: CancelRequest | None = None) -> CancelResult:
    """Cancel a run. Tasks that have not started end now; running tasks are asked to stop."""
    async with caller.write(Channel.STOP, Channel.TASKS) as conn:
        await find_run(caller, conn, run_id)
        asked = await cancel(conn, run_id=run_id, actor=caller.actor, reason=body.reason if body else None)
    return CancelResult(stopping=asked)


async def clear_run(caller: Caller, *, run_id: RunId, body: ClearRequest) -> ClearResult:
    """Run tasks again. Running tasks are stopped first."""
    changing = caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE)
    async with caller.read() if body.is_preview else changing as conn:
        await find_run(caller, conn, run_id)
        chosen = await select_tasks(
            conn, run_id=run_id, names=body.tasks, only_failed=body.only_failed, with_downstream=body.with_downstream
        )
        affected = [row for row in chosen if row.state in AFFECTED]
        newest = await newest_version(conn, run_id) if body.run_on_latest_version else None
        version_id = newest.version_id if newest else None
        change = VersionChange(old=newest.run_number, new=newest.number) if newest and version_id else None
        if body.is_preview or not affected:
            return ClearResult(tasks=affected, reopened=0, stopping=0, version_change=change)
        done = await clear(conn, run_id=run_id, chosen=chosen, actor=caller.actor, version_id=version_id)
    return ClearResult(tasks=affected, reopened=done.reopened, stopping=done.asked, version_change=change)


# The states that a run can be marked with.
MARKED_RUN = (TaskState.SUCCESS, TaskState.FAILED)
_MOST_MARKED = 1000


async def mark_run(caller: Caller, *, run_id: int, state: TaskState) -> int:
    """Decide how a run ended, by its tasks: as success every task that failed or is open, as failed every open task. Running
    tasks are stopped first. The number of tasks that were marked."""
    async with caller.write(Channel.TASKS, Channel.STOP, Channel.SCHEDULE) as conn:
        run = await find_run(caller, conn, run_id)
        rows = await tasks.list_of_run(conn, run_id=run_id, limit=_MOST_MARKED + 1)
        kept = {TaskState.SUCCESS, TaskState.SKIPPED} if state is TaskState.SUCCESS else TERMINAL_TASK_STATES
        wrong = [row for row in rows if row.state not in kept]
        if len(rows) > _MOST_MARKED:
            raise UserError(f"Run {run_id} has more than {_MOST_MARKED} tasks. Mark its tasks instead.")
        if not wrong:
            raise Conflict(f"Run {run_id} of {run.dag} has no task to mark {state}: it ended ({run.state}).")
        marked = 0
        for row in wrong:
            # Marking one task may end others.
            now = await tasks.find(conn, TaskKey(run_id, row.idx, row.map_index))
            if now is not None and now.state not in kept and now.state != state:
                await mark(conn, TaskKey(run_id, row.idx, row.map_index), state=state, actor=caller.actor)
                marked += 1
    return marked


async def delete_run(caller: Caller, *, run_id: int) -> str:
    """Delete an ended run with its logs and results, and return the name of its DAG."""
    async with caller.write() as conn:
        run = await find_run(caller, conn, run_id)
        await delete(conn, run_id=run_id, actor=caller.actor)
    return run.dag


async def find_run(caller: Caller, conn: AsyncConnection, run_id: int) -> RunRow:
    """A run that exists and that the caller may see; its DAG may be deleted by now."""
    row = await runs.find(conn, run_id)
    if row is None or not await caller.sees_dag(conn, row.dag):
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
