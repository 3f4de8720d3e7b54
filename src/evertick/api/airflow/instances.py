"""Task instances: listing, tries, marking, clearing."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.runs import find_run
from evertick.api.airflow.words import (
    MOST_ORDERED,
    USUAL_ITEMS,
    Body,
    Limit,
    Offset,
    OrderBy,
    Texts,
    fits,
    instance_document,
    ordered,
    page_size,
)
from evertick.api.desk import Caller, Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine.clear import clear, newest_version, select_tasks
from evertick.engine.mark import mark
from evertick.store import tasks
from evertick.store.listing import ListedRun
from evertick.store.tasks import AttemptRow, TaskRow
from evertick.store.wake import Channel

router = APIRouter(route_class=GuardedRoute, tags=["Task Instance"])

MapIndex = Annotated[int, Path(ge=-1, le=2**31 - 1)]
R = "/dags/{dag_id}/dagRuns/{dag_run_id}"
_FIELDS = (
    "id",
    "task_id",
    "state",
    "start_date",
    "end_date",
    "duration",
    "map_index",
    "try_number",
    "queue",
    "run_after",
)
_KEYS = {name: (lambda field: lambda item: item[field])(name) for name in _FIELDS}
_OUTCOMES = {"success": "success", "skipped": "skipped"}


class InstancePatch(Body):
    new_state: Literal["success", "failed", "skipped"] | None = None
    note: str | None = None
    include_upstream: bool = False
    include_downstream: bool = False
    include_future: bool = False
    include_past: bool = False


class ClearBody(Body):
    dry_run: bool = True
    start_date: datetime | None = None
    end_date: datetime | None = None
    only_failed: bool = True
    only_running: bool = False
    reset_dag_runs: bool = True
    task_ids: list[str | list[Any]] | None = None
    dag_run_id: Annotated[str, Field(max_length=250)] | None = None
    include_upstream: bool = False
    include_downstream: bool = False
    include_future: bool = False
    include_past: bool = False
    run_on_latest_version: bool | None = None
    prevent_running_task: bool = False
    note: str | None = None


@router.get(f"{R}/taskInstances")
@needs(Permission.READ_RUNS)
async def get_task_instances(
    dag_id: str,
    dag_run_id: str,
    caller: Who,
    task_id: str | None = None,
    state: Texts = None,
    queue: Texts = None,
    try_number: Annotated[list[int] | None, Query()] = None,
    map_index: Annotated[list[int] | None, Query()] = None,
    start_date_gte: datetime | None = None,
    start_date_lte: datetime | None = None,
    duration_gte: float | None = None,
    duration_lte: float | None = None,
    task_display_name_pattern: str | None = None,
    task_display_name_prefix_pattern: str | None = None,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        rows = await tasks.list_of_run(conn, run_id=run.run_id, limit=MOST_ORDERED)
    found = [instance_document(run, row) for row in rows]
    found = [
        each
        for each in found
        if (task_id is None or each["task_id"] == task_id)
        and (not state or (each["state"] or "none") in state)
        and (not queue or each["queue"] in queue)
        and (not try_number or each["try_number"] in try_number)
        and (not map_index or each["map_index"] in map_index)
        and _within(each["start_date"], start_date_gte, start_date_lte)
        and _within(each["duration"], duration_gte, duration_lte)
        and fits(each["task_id"], task_display_name_pattern, task_display_name_prefix_pattern)
    ]
    found = ordered(found, order_by, _KEYS)
    part = found[offset : offset + page_size(limit)]
    return {"task_instances": part, "total_entries": len(found), "total_entries_limit": MOST_ORDERED}


@router.get(f"{R}/taskInstances/{{task_id}}")
@needs(Permission.READ_RUNS)
async def get_task_instance(dag_id: str, dag_run_id: str, task_id: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        run, row = await find_instance(caller, conn, dag_id, dag_run_id, task_id, -1)
        return await _with_place(conn, run, row)


@router.patch(f"{R}/taskInstances/{{task_id}}")
@needs(Permission.MARK_TASKS)
async def patch_task_instance(
    dag_id: str, dag_run_id: str, task_id: str, body: InstancePatch, caller: Who, map_index: int = -1
) -> dict[str, Any]:
    return await _patch(caller, (dag_id, dag_run_id, task_id), map_index, body)


@router.get(f"{R}/taskInstances/{{task_id}}/listMapped")
@needs(Permission.READ_RUNS)
async def get_mapped_task_instances(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, limit: Limit = USUAL_ITEMS, offset: Offset = 0
) -> dict[str, Any]:
    async with caller.reading() as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        rows = await tasks.by_name(conn, run_id=run.run_id, task=task_id)
    if not rows:
        raise _missing(dag_id, dag_run_id, task_id)
    found = [instance_document(run, row) for row in rows if row.map_index >= 0]
    return {"task_instances": found[offset : offset + page_size(limit)], "total_entries": len(found)}


@router.get(f"{R}/taskInstances/{{task_id}}/tries")
@needs(Permission.READ_RUNS)
async def get_task_instance_tries(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: int = -1
) -> dict[str, Any]:
    async with caller.reading() as conn:
        found = await _tries(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    return {"task_instances": found, "total_entries": len(found)}


@router.get(f"{R}/taskInstances/{{task_id}}/tries/{{task_try_number}}")
@needs(Permission.READ_RUNS)
async def get_task_instance_try_details(
    dag_id: str, dag_run_id: str, task_id: str, task_try_number: int, caller: Who, map_index: int = -1
) -> dict[str, Any]:
    async with caller.reading() as conn:
        found = await _tries(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    for each in found:
        if each["try_number"] == task_try_number:
            return each
    raise NotFound(f"The Task Instance has no try {task_try_number}")


@router.get(f"{R}/taskInstances/{{task_id}}/{{map_index}}")
@needs(Permission.READ_RUNS)
async def get_mapped_task_instance(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, caller: Who
) -> dict[str, Any]:
    async with caller.reading() as conn:
        run, row = await find_instance(caller, conn, dag_id, dag_run_id, task_id, map_index)
        return await _with_place(conn, run, row)


@router.patch(f"{R}/taskInstances/{{task_id}}/{{map_index}}")
@needs(Permission.MARK_TASKS)
async def patch_mapped_task_instance(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, body: InstancePatch, caller: Who
) -> dict[str, Any]:
    return await _patch(caller, (dag_id, dag_run_id, task_id), map_index, body)


@router.post("/dags/{dag_id}/clearTaskInstances")
@needs(Permission.CLEAR_TASKS)
async def post_clear_task_instances(dag_id: str, body: ClearBody, caller: Who) -> dict[str, Any]:
    """Of one run: without `dag_run_id` it is refused, rather than cleared in more runs than somebody meant."""
    if body.dag_run_id is None:
        raise UserError("dag_run_id is needed: tasks are cleared in one run at a time.")
    names = [each if isinstance(each, str) else str(each[0]) for each in body.task_ids or [] if each]
    async with caller.changing(Channel.READY, Channel.STOP) as conn:
        run = await find_run(caller, conn, dag_id, body.dag_run_id)
        chosen = await select_tasks(
            conn,
            run_id=run.run_id,
            names=names,
            only_failed=body.only_failed and not body.only_running,
            with_downstream=body.include_downstream,
        )
        if body.only_running:
            chosen = [row for row in chosen if row.state == "running"]
        if body.prevent_running_task and any(row.state == "running" for row in chosen):
            raise Conflict("Task instances are running: they are not cleared while prevent_running_task is set.")
        if not body.dry_run and chosen:
            newest = await newest_version(conn, run.run_id) if body.run_on_latest_version else None
            version_id = newest.version_id if newest else None
            await clear(conn, run_id=run.run_id, chosen=chosen, actor=caller.actor, version_id=version_id)
    found = [instance_document(run, row) for row in chosen]
    return {"task_instances": found, "total_entries": len(found)}


async def find_instance(
    caller: Caller, conn: AsyncConnection, dag_id: str, dag_run_id: str, task_id: str, map_index: int
) -> tuple[ListedRun, TaskRow]:
    run = await find_run(caller, conn, dag_id, dag_run_id)
    for row in await tasks.by_name(conn, run_id=run.run_id, task=task_id):
        if row.map_index == map_index:
            return run, row
    raise _missing(dag_id, dag_run_id, task_id)


async def _patch(caller: Caller, names: tuple[str, str, str], map_index: int, body: InstancePatch) -> dict[str, Any]:
    async with caller.changing(Channel.READY, Channel.STOP) as conn:
        run, row = await find_instance(caller, conn, *names, map_index)
        if body.new_state is not None:
            await mark(conn, TaskKey(run.run_id, row.idx, row.map_index), state=body.new_state, actor=caller.actor)
        run, row = await find_instance(caller, conn, *names, map_index)
    return {"task_instances": [instance_document(run, row)], "total_entries": 1}


async def _with_place(conn: AsyncConnection, run: ListedRun, row: TaskRow) -> dict[str, Any]:
    """With where its latest try ran."""
    made = await tasks.attempts(conn, TaskKey(run.run_id, row.idx, row.map_index))
    return {**instance_document(run, row), "hostname": made[-1].host if made else None}


async def _tries(
    caller: Caller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int
) -> list[dict[str, Any]]:
    run, row = await find_instance(caller, conn, *names, map_index)
    document = instance_document(run, row)
    made = await tasks.attempts(conn, TaskKey(run.run_id, row.idx, row.map_index))
    return [{**document, **_try(number, each)} for number, each in enumerate(made, 1)]


def _try(number: int, row: AttemptRow) -> dict[str, Any]:
    seconds = (row.finished_at - row.started_at).total_seconds() if row.started_at and row.finished_at else None
    state = "running" if row.finished_at is None else _OUTCOMES.get(row.outcome, "failed")
    return {
        "try_number": number,
        "state": state,
        "start_date": row.started_at,
        "end_date": row.finished_at,
        "duration": seconds,
        "hostname": row.host,
    }


def _within(value: Any, first: Any, last: Any) -> bool:
    if first is None and last is None:
        return True
    return value is not None and (first is None or value >= first) and (last is None or value <= last)


def _missing(dag_id: str, dag_run_id: str, task_id: str) -> NotFound:
    return NotFound(
        f"The Task Instance with dag_id: `{dag_id}`, run_id: `{dag_run_id}` and task_id: `{task_id}` was not found"
    )
