"""DAG runs: listing, triggering, ending by hand, clearing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.words import (
    EVERY,
    MOST_ORDERED,
    USUAL_ITEMS,
    Body,
    Limit,
    Offset,
    OrderBy,
    Texts,
    instance_document,
    ordered,
    page_size,
    patterns,
    run_document,
)
from evertick.api.desk import Caller, Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.states import TERMINAL_TASK_STATES
from evertick.engine.clear import clear, newest_version, select_tasks
from evertick.engine.mark import mark
from evertick.engine.trigger import trigger
from evertick.store import listing, tasks
from evertick.store.listing import ListedRun, RunFilter
from evertick.store.wake import Channel

router = APIRouter(route_class=GuardedRoute, tags=["DagRun"])

Instant = Annotated[datetime | None, Query()]
_OURS = {"queued": ["queued"], "running": ["running"], "success": ["success"], "failed": ["failed", "canceled"]}
_KEYS = {
    "id": lambda row: row.run_id,
    "dag_id": lambda row: row.dag,
    "dag_run_id": lambda row: row.text_id,
    "run_id": lambda row: row.text_id,
    "state": lambda row: row.state,
    "run_type": lambda row: row.kind,
    "logical_date": lambda row: row.fire_at,
    "run_after": lambda row: row.due_at,
    "queued_at": lambda row: row.created_at,
    "start_date": lambda row: row.started_at,
    "end_date": lambda row: row.finished_at,
    "duration": lambda row: row.seconds,
}


class TriggerBody(Body):
    dag_run_id: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    logical_date: datetime | None = Field(default=...)
    data_interval_start: datetime | None = None
    data_interval_end: datetime | None = None
    run_after: datetime | None = None
    conf: dict[str, Any] | None = None
    note: str | None = None
    partition_key: str | None = None


class RunPatch(Body):
    state: Literal["queued", "success", "failed"] | None = None
    note: str | None = None


class RunClear(Body):
    dry_run: bool = True
    only_failed: bool = False
    only_new: bool = False
    run_on_latest_version: bool | None = None
    note: str | None = None


@router.get("/dags/{dag_id}/dagRuns")
@needs(Permission.READ_RUNS)
async def get_dag_runs(
    dag_id: str,
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    run_after_gte: Instant = None,
    run_after_lte: Instant = None,
    logical_date_gte: Instant = None,
    logical_date_lte: Instant = None,
    start_date_gte: Instant = None,
    start_date_lte: Instant = None,
    end_date_gte: Instant = None,
    end_date_lte: Instant = None,
    duration_gte: float | None = None,
    duration_lte: float | None = None,
    run_type: Texts = None,
    state: Texts = None,
    dag_version: Annotated[list[int] | None, Query()] = None,
    order_by: OrderBy = None,
    run_id_pattern: str | None = None,
    run_id_prefix_pattern: str | None = None,
    triggering_user_name_pattern: str | None = None,
    dag_id_pattern: str | None = None,
    dag_id_prefix_pattern: str | None = None,
) -> dict[str, Any]:
    wanted = RunFilter(
        states=None if not state else [ours for each in state for ours in _OURS.get(each, [])],
        kinds=run_type or None,
        version=dag_version[0] if dag_version else None,
        due_from=run_after_gte,
        due_until=run_after_lte,
        fire_from=logical_date_gte,
        fire_until=logical_date_lte,
        start_from=start_date_gte,
        start_until=start_date_lte,
        end_from=end_date_gte,
        end_until=end_date_lte,
        seconds_from=duration_gte,
        seconds_until=duration_lte,
        like=patterns(run_id_pattern, run_id_prefix_pattern),
        actor_like=patterns(triggering_user_name_pattern, None),
        dag_like=patterns(dag_id_pattern, dag_id_prefix_pattern),
    )
    async with caller.reading() as conn:
        found = await listing.runs_by_id(
            conn, replace(wanted, dag_ids=await _dag_ids(caller, conn, dag_id)), offset=0, limit=MOST_ORDERED
        )
    # Oldest first unless asked otherwise, as there.
    sorted_runs = ordered(list(reversed(found)), order_by or ["id"], _KEYS)
    part = sorted_runs[offset : offset + page_size(limit)]
    return {
        "dag_runs": [run_document(row) for row in part],
        "total_entries": len(found),
        "total_entries_limit": MOST_ORDERED,
    }


@router.post("/dags/{dag_id}/dagRuns")
@needs(Permission.TRIGGER_RUNS)
async def trigger_dag_run(dag_id: str, body: TriggerBody, caller: Who) -> dict[str, Any]:
    for name in ("logical_date", "data_interval_start", "data_interval_end", "partition_key"):
        if getattr(body, name) is not None:
            raise UserError(f"{name} must be null: a run that is triggered has no instant of a schedule.")
    async with caller.changing(Channel.READY) as conn:
        row = await caller.dag(conn, dag_id)
        made = await trigger(conn, dag=dag_id, params=body.conf or {}, actor=caller.actor, key=body.dag_run_id)
        if not made.is_new:
            raise Conflict(f"DAGRun with ID: '{body.dag_run_id}' already exists")
        found = await listing.runs_by_id(conn, RunFilter(dag_ids=[row.dag_id]), offset=0, limit=100)
    return run_document(next(each for each in found if each.run_id == made.run_id))


@router.get("/dags/{dag_id}/dagRuns/{dag_run_id}")
@needs(Permission.READ_RUNS)
async def get_dag_run(dag_id: str, dag_run_id: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.patch("/dags/{dag_id}/dagRuns/{dag_run_id}")
@needs(Permission.MARK_TASKS)
async def patch_dag_run(
    dag_id: str, dag_run_id: str, body: RunPatch, caller: Who, update_mask: Texts = None
) -> dict[str, Any]:
    """success and failed end what is open; queued runs everything again."""
    async with caller.changing(Channel.READY, Channel.STOP) as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        if body.state is not None and (update_mask is None or "state" in update_mask):
            await _set_state(caller, conn, run, body.state)
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.post("/dags/{dag_id}/dagRuns/{dag_run_id}/clear")
@needs(Permission.CLEAR_TASKS)
async def clear_dag_run(dag_id: str, dag_run_id: str, body: RunClear, caller: Who) -> dict[str, Any]:
    async with caller.changing(Channel.READY, Channel.STOP) as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        chosen = await select_tasks(conn, run_id=run.run_id, only_failed=body.only_failed)
        if body.dry_run:
            return {
                "task_instances": [instance_document(run, row) for row in chosen],
                "total_entries": len(chosen),
            }
        newest = await newest_version(conn, run.run_id) if body.run_on_latest_version else None
        version_id = newest.version_id if newest else None
        await clear(conn, run_id=run.run_id, chosen=chosen, actor=caller.actor, version_id=version_id)
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


async def find_run(caller: Caller, conn: AsyncConnection, dag_id: str, dag_run_id: str) -> ListedRun:
    row = await caller.dag(conn, dag_id)
    run = await listing.find_run(conn, dag_id=row.dag_id, text_id=dag_run_id)
    if run is None:
        raise NotFound(f"The DagRun with dag_id: `{dag_id}` and run_id: `{dag_run_id}` was not found")
    return run


async def _dag_ids(caller: Caller, conn: AsyncConnection, dag_id: str) -> list[int] | None:
    if dag_id == EVERY:
        return await caller.visible(conn)
    return [(await caller.dag(conn, dag_id)).dag_id]


async def _set_state(caller: Caller, conn: AsyncConnection, run: ListedRun, state: str) -> None:
    rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=MOST_ORDERED)
    if state == "queued":
        await clear(conn, run_id=run.run_id, chosen=rows, actor=caller.actor)
        return
    for row in rows:
        if row.state not in TERMINAL_TASK_STATES:
            # What never began is skipped, what runs ends as the run does.
            wanted = state if row.state in ("running", "queued") or state == "failed" else "skipped"
            current = await tasks.find(conn, TaskKey(run.run_id, row.idx, row.map_index))
            if current is not None and current.state not in TERMINAL_TASK_STATES:
                await mark(conn, TaskKey(run.run_id, row.idx, row.map_index), state=wanted, actor=caller.actor)
