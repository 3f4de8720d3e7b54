"""DAGs and their tasks: list, read, pause, delete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, assert_never

from fastapi import Query
from psycopg import AsyncConnection

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import BUNDLE, NO_POOL, OWNER, broken_files, operator_of, ours, version_of
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import dags, listings, schedules
from evertick.db.queries.dags import DagRow
from evertick.db.queries.listings import ListedDagFilter
from evertick.db.queries.run_lists import PageRequest
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.access import Permission
from evertick.domain.dags.gates import GateKind, awaits_past
from evertick.domain.dags.graph import mapping_at
from evertick.domain.dags.spec import TaskSpec
from evertick.domain.errors import UserError
from evertick.domain.retry import Backoff
from evertick.domain.schedules.cron import without_macro
from evertick.domain.schedules.dependencies import read_text, sources_of
from evertick.domain.schedules.run_partitions import is_partitioned
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe
from evertick.engine.fire_schedules import UNPLANNABLE, in_words, read_spec
from evertick.operations import dags as operations
from evertick.operations.dags import spec_of

router = GuardedRouter(tags=["DAG"])

_MOST_ACTIVE_TASKS = 16
ORDER = {
    "dag_id": ["dag"],
    "dag_display_name": ["dag"],
    "next_dagrun": ["next_due"],
    "state": ["last_state"],
    "start_date": ["last_started_at"],
    "last_run_state": ["last_state"],
    "last_run_start_date": ["last_started_at"],
}
TASK_FIELDS = (
    "task_id",
    "task_display_name",
    "owner",
    "trigger_rule",
    "depends_on_past",
    "wait_for_downstream",
    "retries",
    "queue",
    "pool",
    "pool_slots",
    "retry_exponential_backoff",
    "priority_weight",
    "weight_rule",
    "operator_name",
    "is_mapped",
)
TASK_ORDER = {name: name for name in TASK_FIELDS}


class DagPatch(query.Body):
    is_paused: bool


@router.get("/dags", Permission.READ_DAGS, models.DAGCollectionResponse)
async def get_dags(caller: Who, asked: Annotated[query.DagQuery, Query()]) -> dict[str, Any]:
    """List DAGs, by default ordered by id. Filters on runs apply to the latest run of each DAG."""
    order = query.columns(asked.order_by, ORDER)
    state = asked.last_dag_run_state
    wanted = ListedDagFilter(
        seen_tags=seen_tags(caller),
        any_tags=asked.tags if asked.tags and asked.tags_match_mode != "all" else None,
        all_tags=asked.tags if asked.tags and asked.tags_match_mode == "all" else None,
        owners=asked.owners or None,
        paused=asked.paused,
        is_broken=asked.has_import_errors,
        **query.patterns(asked, _="dag_id", name="dag_display_name"),
        last_states=_both(ours(list(asked.dag_run_state or ())), ours([state] if state else None)),
        last_started=query.span(asked, "dag_run_start_date"),
        last_finished=query.span(asked, "dag_run_end_date"),
        has_assets=asked.has_asset_schedule,
        asset_like=query.plainly_contains(asked.asset_dependency),
    )
    if _asks_for_what_is_not_here(asked):
        return {"dags": [], "total_entries": 0}
    async with caller.read() as conn:
        names, total = await listings.list_dags(conn, wanted, query.paged(asked, order))
        return {"dags": await _documents(conn, await dags.named(conn, names)), "total_entries": total}


@router.patch("/dags", Permission.PAUSE_DAGS, models.DAGCollectionResponse)
async def patch_dags(
    body: DagPatch,
    caller: Who,
    update_mask: query.Texts = None,
    limit: query.Limit = 50,
    offset: query.Offset = 0,
    tags: query.Texts = None,
    tags_match_mode: Literal["any", "all"] | None = None,
    owners: query.Texts = None,
    dag_id_pattern: query.Pattern = None,
    dag_id_prefix_pattern: query.Pattern = None,
    exclude_stale: bool = True,
    paused: bool | None = None,
) -> dict[str, Any]:
    """Update all DAGs that match the filters."""
    wanted = ListedDagFilter(
        seen_tags=seen_tags(caller),
        any_tags=tags if tags and tags_match_mode != "all" else None,
        all_tags=tags if tags and tags_match_mode == "all" else None,
        owners=owners or None,
        like=query.contains(dag_id_pattern),
        heads=query.begins(dag_id_prefix_pattern),
        paused=paused,
    )
    async with caller.read() as conn:
        names, total = await listings.list_dags(conn, wanted, PageRequest(limit=query.page_size(limit), offset=offset))
    for name in names:
        await _pause(caller, name, body, update_mask)
    async with caller.read() as conn:
        return {"dags": await _documents(conn, await dags.named(conn, names)), "total_entries": total}


@router.get("/dags/{dag_id}", Permission.READ_DAGS, models.DAGResponse)
async def get_dag(dag_id: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return (await _documents(conn, [await caller.dag(conn, dag_id)]))[0]


@router.patch("/dags/{dag_id}", Permission.PAUSE_DAGS, models.DAGResponse)
async def patch_dag(dag_id: str, body: DagPatch, caller: Who, update_mask: query.Texts = None) -> dict[str, Any]:
    await _pause(caller, dag_id, body, update_mask)
    return await get_dag(dag_id, caller)


@router.delete("/dags/{dag_id}", Permission.DELETE_DAGS, status_code=204)
async def delete_dag(dag_id: str, caller: Who) -> None:
    """Delete the DAG and keep its history. If its file still exists, a change of the file publishes the DAG again."""
    await operations.delete_dag(caller, dag=dag_id)


@router.get("/dags/{dag_id}/details", Permission.READ_DAGS, models.DAGDetailsResponse)
async def get_dag_details(dag_id: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await caller.dag(conn, dag_id)
        plans = await schedules.of_dags(conn, [row.dag_id])
        (document,) = await _documents(conn, [row])
        active = await listings.active_runs(conn, row.dag_id)
    spec = spec_of(row)
    readable = list(_readable(plans))
    assert row.version_id is not None and row.number is not None and row.created_at is not None
    return {
        **document,
        "catchup": spec.misfire.value == "all",
        "concurrency": spec.max_active_tasks or _MOST_ACTIVE_TASKS,
        "render_template_as_native_obj": False,
        "dag_run_timeout": f"PT{spec.run_timeout_seconds:g}S" if spec.run_timeout_seconds else None,
        "start_date": min((each.start_at for each in readable if each.start_at), default=None),
        "timezone": spec.timezone,
        "is_paused_upon_creation": spec.starts_paused,
        "params": {each.name: {"value": each.default, "description": each.description} for each in spec.params},
        "latest_dag_version": version_of(row.name, row.version_id, row.number, row.created_at),
        "last_parsed": row.created_at,
        "doc_md": spec.description,
        "active_runs_count": active,
    }


@router.get("/dags/{dag_id}/tasks", Permission.READ_DAGS, models.TaskCollectionResponse)
async def get_tasks(dag_id: str, caller: Who, order_by: str = "task_id") -> dict[str, Any]:
    found = await _tasks(caller, dag_id)
    return {"tasks": query.ordered(found, [order_by], TASK_ORDER), "total_entries": len(found)}


@router.get("/dags/{dag_id}/tasks/{task_id}", Permission.READ_DAGS, models.TaskResponse)
async def get_task(dag_id: str, task_id: str, caller: Who) -> dict[str, Any]:
    found = await _tasks(caller, dag_id)
    return query.first_of(
        (task for task in found if task["task_id"] == task_id), f"Task with id {task_id} was not found"
    )


async def _documents(conn: AsyncConnection, rows: Sequence[DagRow]) -> list[dict[str, Any]]:
    """The response documents of DAGs, with their schedules and import errors."""
    plans: dict[str, list[ListedSchedule]] = {}
    for each in await schedules.of_dags(conn, [row.dag_id for row in rows]):
        plans.setdefault(each.dag, []).append(each)
    broken = broken_files(await dags.import_errors(conn))
    return [_document(row, plans.get(row.name, []), (row.deployment, row.file) in broken) for row in rows]


async def _pause(caller: ApiCaller, dag: str, body: DagPatch, mask: list[str] | None) -> None:
    if mask and mask != ["is_paused"]:
        raise UserError("Only `is_paused` field can be updated through the REST API")
    await (operations.pause_dag if body.is_paused else operations.unpause_dag)(caller, dag=dag)


def seen_tags(caller: ApiCaller) -> list[str] | None:
    limits = caller.principal.tags
    return None if limits is None else sorted(limits)


def _both(one: list[str] | None, other: list[str] | None) -> list[str] | None:
    return one if other is None else other if one is None else [each for each in one if each in other]


def _asks_for_what_is_not_here(asked: query.DagQuery) -> bool:
    """Whether the filters exclude all DAGs: every DAG has an unversioned bundle, and none is a favorite."""
    return bool(
        asked.bundle_name not in (None, BUNDLE)
        or asked.bundle_version is not None
        or asked.is_favorite
        or asked.timetable_type
    )


def _document(row: DagRow, plans: list[ListedSchedule], is_broken: bool) -> dict[str, Any]:
    spec = spec_of(row)
    coming = (each.next_due for each in plans if each.next_due and not each.paused)
    due = None if row.paused else min(coming, default=None)
    words = "; ".join(in_words(each.spec) for each in plans)
    readable = list(_readable(plans))
    # As in Airflow, other DAGs run once, after assets or when they are triggered.
    others = (ScheduleKind.ONCE, ScheduleKind.AFTER, ScheduleKind.EVENT)
    is_periodic = any(each.kind not in others for each in readable)
    return {
        "dag_id": row.name,
        "dag_display_name": row.name,
        "is_paused": row.paused,
        "is_stale": False,
        "last_parsed_time": row.created_at,
        "bundle_name": BUNDLE,
        "relative_fileloc": row.file,
        "fileloc": row.file,
        "file_token": row.file,
        "description": spec.description,
        "timetable_summary": "; ".join(map(_summary, readable)) or None,
        "timetable_description": words or "Never, external triggers only",
        "timetable_partitioned": any(map(is_partitioned, readable)),
        "timetable_periodic": is_periodic,
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
        "owners": [spec.owner or OWNER],
        "is_backfillable": is_periodic,
    }


def _readable(plans: Sequence[ListedSchedule]) -> Iterator[ScheduleSpec]:
    """The schedules, except those that a newer release wrote and this one cannot parse."""
    for each in plans:
        with suppress(*UNPLANNABLE):
            yield read_spec(each.spec)


def _summary(spec: ScheduleSpec) -> str:
    """A schedule as Airflow's timetables are written."""
    match spec.kind:
        case ScheduleKind.CRON:
            return without_macro(spec.expression or "")
        case ScheduleKind.INTERVAL:
            return str(spec.every)
        case ScheduleKind.ONCE:
            return "@once"
        case ScheduleKind.AFTER:
            is_of_assets = {each.kind for each in sources_of(read_text(spec.after or ""))} <= {"asset", "alias"}
            return "Asset" if is_of_assets else describe(spec)
        case ScheduleKind.TIMES | ScheduleKind.COMPUTED | ScheduleKind.EVENT:
            return describe(spec)
        case _:
            assert_never(spec.kind)


async def _tasks(caller: ApiCaller, dag: str) -> list[dict[str, Any]]:
    async with caller.read() as conn:
        row = await caller.dag(conn, dag)
        queues = await dags.queues(conn, row.version_id)
    spec = spec_of(row)
    names = [task.name for task in spec.tasks]
    below: dict[str, list[str]] = {name: [] for name in names}
    for up, down in spec.edges:
        below[names[up]].append(names[down])
    return [
        {
            **_task(task, sorted(below[task.name]), queues[place] if place < len(queues) else task.queue, spec.owner),
            "is_mapped": mapping_at(spec, place) is not None,
        }
        for place, task in enumerate(spec.tasks)
    ]


def _task(task: TaskSpec, below: list[str], queue: str | None, owner: str | None) -> dict[str, Any]:
    pools = [gate for gate in task.gates if gate.kind is GateKind.POOL]
    return {
        "task_id": task.name,
        "task_display_name": task.name,
        "owner": owner or OWNER,
        "trigger_rule": task.trigger_rule.value,
        "extra_links": [],
        "depends_on_past": awaits_past(task.gates),
        "wait_for_downstream": False,
        "retries": task.retry.retries,
        "queue": queue,
        "pool": pools[0].name if pools else NO_POOL,
        "pool_slots": pools[0].weight if pools else 1,
        "execution_timeout": _delta(task.timeout_seconds),
        "retry_delay": _delta(task.retry.delay_seconds),
        "retry_exponential_backoff": 2.0 if task.retry.backoff is Backoff.EXPONENTIAL else 0.0,
        "priority_weight": task.priority,
        "weight_rule": "absolute",
        "operator_name": operator_of(task.kind),
        "class_ref": {"module_path": "evertick", "class_name": task.kind},
        "params": {},
        "template_fields": [],
        "downstream_task_ids": below,
        "doc_md": task.doc,
        "ui_color": "#fff",
        "ui_fgcolor": "#000",
    }


def _delta(seconds: float | None) -> dict[str, Any] | None:
    if seconds is None:
        return None
    days, rest = divmod(seconds, 86_400)
    return {"__type": "TimeDelta", "days": int(days), "seconds": int(rest), "microseconds": round(rest % 1 * 1e6)}
