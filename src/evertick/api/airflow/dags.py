"""DAGs and their tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from psycopg import AsyncConnection

from evertick.api.airflow.words import (
    USUAL_ITEMS,
    Body,
    Limit,
    Offset,
    OrderBy,
    Texts,
    fits,
    ordered,
    page_size,
    version_of,
)
from evertick.api.desk import Caller, Who
from evertick.api.guard import GuardedRoute, needs
from evertick.api.native.dags import spec_of
from evertick.domain.access import Permission
from evertick.domain.dag import DagSpec, TaskSpec
from evertick.domain.errors import NotFound
from evertick.domain.gates import GateKind
from evertick.domain.retry import Backoff
from evertick.engine import pause as verbs
from evertick.engine.plan import in_words
from evertick.store import dags, runs, schedules
from evertick.store.dags import DagFilter, DagRow
from evertick.store.schedules import ListedSchedule
from evertick.store.wake import Channel

router = APIRouter(route_class=GuardedRoute, tags=["DAG"])

_MOST_DAGS = 10_000
_MOST_ACTIVE_TASKS = 16


class DagPatch(Body):
    is_paused: bool


@router.get("/dags")
@needs(Permission.READ_DAGS)
async def get_dags(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    tags: Texts = None,
    tags_match_mode: Annotated[str | None, Query(pattern="^(any|all)$")] = None,
    dag_id_pattern: str | None = None,
    dag_id_prefix_pattern: str | None = None,
    paused: bool | None = None,
    last_dag_run_state: str | None = None,
    order_by: OrderBy = None,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        limits = caller.principal.tags
        wanted = DagFilter(tags=None if limits is None else sorted(limits), paused=paused)
        found = await dags.page(conn, wanted, after="", limit=_MOST_DAGS)
        last = (
            {run.dag: run for run in await runs.newest_of_each_dag(conn, limit=_MOST_DAGS)}
            if last_dag_run_state
            else {}
        )
        plans, broken = await _surroundings(conn)
    found = [row for row in found if fits(row.name, dag_id_pattern, dag_id_prefix_pattern)]
    if tags:
        every = all if tags_match_mode == "all" else any
        found = [row for row in found if every(tag in _tags(row) for tag in tags)]
    if last_dag_run_state:
        found = [row for row in found if row.name in last and last[row.name].state == last_dag_run_state]
    keys = {
        "dag_id": lambda row: row.name,
        "dag_display_name": lambda row: row.name,
        "is_paused": lambda row: row.paused,
        "next_dagrun": lambda row: _next(plans.get(row.name, [])),
    }
    found = ordered(found, order_by, keys)
    part = found[offset : offset + page_size(limit)]
    return {
        "dags": [_document(row, plans.get(row.name, []), row.file in broken) for row in part],
        "total_entries": len(found),
    }


@router.get("/dags/{dag_id}")
@needs(Permission.READ_DAGS)
async def get_dag(dag_id: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        return await _one(caller, conn, dag_id)


@router.patch("/dags/{dag_id}")
@needs(Permission.PAUSE_DAGS)
async def patch_dag(dag_id: str, body: DagPatch, caller: Who, update_mask: Texts = None) -> dict[str, Any]:
    async with caller.changing(Channel.PLAN, Channel.READY) as conn:
        await caller.dag(conn, dag_id)
        if update_mask is None or "is_paused" in update_mask:
            verb = verbs.pause if body.is_paused else verbs.unpause
            await verb(conn, dag=dag_id, actor=caller.actor)
        return await _one(caller, conn, dag_id)


@router.get("/dags/{dag_id}/details")
@needs(Permission.READ_DAGS)
async def get_dag_details(dag_id: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag_id)
        document = await _one(caller, conn, dag_id)
    spec = spec_of(row)
    assert row.version_id is not None and row.number is not None and row.created_at is not None
    return {
        **document,
        "catchup": spec.misfire.value == "all",
        "concurrency": spec.max_active_tasks or _MOST_ACTIVE_TASKS,
        "render_template_as_native_obj": False,
        "dag_run_timeout": f"PT{spec.run_timeout_seconds:g}S" if spec.run_timeout_seconds else None,
        "timezone": spec.timezone,
        "is_paused_upon_creation": spec.starts_paused,
        "params": {each.name: {"value": each.default, "description": each.description} for each in spec.params},
        "latest_dag_version": version_of(row.name, row.version_id, row.number, row.created_at),
        "last_parsed": row.created_at,
        "doc_md": spec.description,
        "is_favorite": False,
        "active_runs_count": 0,
    }


@router.get("/dags/{dag_id}/tasks")
@needs(Permission.READ_DAGS)
async def get_tasks(dag_id: str, caller: Who, order_by: str = "task_id") -> dict[str, Any]:
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag_id)
        queues = await dags.queues(conn, row.version_id)
    found = _tasks(spec_of(row), queues)
    keys = {
        name: _by(name)
        for name in ("task_id", "task_display_name", "queue", "priority_weight", "retries", "trigger_rule")
    }
    return {"tasks": ordered(found, [order_by], keys), "total_entries": len(found)}


@router.get("/dags/{dag_id}/tasks/{task_id}")
@needs(Permission.READ_DAGS)
async def get_task(dag_id: str, task_id: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag_id)
        queues = await dags.queues(conn, row.version_id)
    for task in _tasks(spec_of(row), queues):
        if task["task_id"] == task_id:
            return task
    raise NotFound(f"Task with id {task_id} was not found")


async def _one(caller: Caller, conn: AsyncConnection, dag_id: str) -> dict[str, Any]:
    row = await caller.dag(conn, dag_id)
    plans, broken = await _surroundings(conn, dag_id)
    return _document(row, plans.get(row.name, []), row.file in broken)


async def _surroundings(
    conn: AsyncConnection, dag: str | None = None
) -> tuple[dict[str, list[ListedSchedule]], set[str]]:
    """The schedules of each DAG, and the files that cannot be loaded."""
    plans: dict[str, list[ListedSchedule]] = {}
    for each in await schedules.list_all(conn, dag=dag, limit=_MOST_DAGS):
        plans.setdefault(each.dag, []).append(each)
    return plans, {error.file for error in await dags.import_errors(conn)}


def _document(row: DagRow, plans: list[ListedSchedule], is_broken: bool) -> dict[str, Any]:
    spec = spec_of(row)
    due = None if row.paused else _next(plans)
    words = "; ".join(in_words(each.spec) for each in plans) or None
    return {
        "dag_id": row.name,
        "dag_display_name": row.name,
        "is_paused": row.paused,
        "is_stale": False,
        "last_parsed_time": row.created_at,
        "last_parse_duration": None,
        "last_expired": None,
        "bundle_name": "dags-folder",
        "bundle_version": None,
        "relative_fileloc": row.file,
        "fileloc": row.file,
        "file_token": row.file,
        "description": spec.description,
        "timetable_summary": words,
        "timetable_description": words,
        "timetable_partitioned": False,
        "timetable_periodic": bool(plans),
        "tags": [{"name": tag, "dag_id": row.name, "dag_display_name": row.name} for tag in spec.tags],
        "max_active_tasks": spec.max_active_tasks or _MOST_ACTIVE_TASKS,
        "max_active_runs": spec.max_active_runs,
        "max_consecutive_failed_dag_runs": 0,
        "has_task_concurrency_limits": any(gate.kind is GateKind.TASK for task in spec.tasks for gate in task.gates),
        "has_import_errors": is_broken,
        "next_dagrun_logical_date": due,
        "next_dagrun_data_interval_start": due,
        "next_dagrun_data_interval_end": due,
        "next_dagrun_run_after": due,
        "allowed_run_types": None,
        "owners": ["evertick"],
        "is_backfillable": bool(plans),
    }


def _tasks(spec: DagSpec, queues: list[str]) -> list[dict[str, Any]]:
    names = [task.name for task in spec.tasks]
    below: dict[str, list[str]] = {name: [] for name in names}
    for up, down in spec.edges:
        below[names[up]].append(names[down])
    return [
        _task(task, sorted(below[task.name]), queues[place] if place < len(queues) else task.queue)
        for place, task in enumerate(spec.tasks)
    ]


def _task(task: TaskSpec, below: list[str], queue: str | None) -> dict[str, Any]:
    pools = [gate for gate in task.gates if gate.kind is GateKind.POOL]
    return {
        "task_id": task.name,
        "task_display_name": task.name,
        "owner": "evertick",
        "trigger_rule": task.trigger_rule.value,
        "extra_links": [],
        "depends_on_past": False,
        "wait_for_downstream": False,
        "retries": task.retry.retries,
        "queue": queue,
        "pool": pools[0].name if pools else "default_pool",
        "pool_slots": pools[0].weight if pools else 1,
        "execution_timeout": _delta(task.timeout_seconds),
        "retry_delay": _delta(task.retry.delay_seconds),
        "retry_exponential_backoff": 2.0 if task.retry.backoff is Backoff.EXPONENTIAL else 0.0,
        "priority_weight": task.priority,
        "weight_rule": "absolute",
        "operator_name": {"python": "PythonOperator", "shell": "BashOperator"}.get(task.kind, task.kind),
        "class_ref": {"module_path": "evertick", "class_name": task.kind},
        "params": {},
        "template_fields": [],
        "downstream_task_ids": below,
        "doc_md": task.doc,
        "is_mapped": False,
        "ui_color": "#fff",
        "ui_fgcolor": "#000",
    }


def _delta(seconds: float | None) -> dict[str, Any] | None:
    if seconds is None:
        return None
    days, rest = divmod(seconds, 86_400)
    return {"__type": "TimeDelta", "days": int(days), "seconds": int(rest), "microseconds": round(rest % 1 * 1e6)}


def _next(plans: list[ListedSchedule]) -> datetime | None:
    return min((each.next_due for each in plans if each.next_due and not each.paused), default=None)


def _tags(row: DagRow) -> list[str]:
    return list(spec_of(row).tags)


def _by(name: str) -> Any:
    return lambda task: task[name]
