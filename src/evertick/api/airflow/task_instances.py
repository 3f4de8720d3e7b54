"""Task instances: list, read, tries and blocking dependencies. Changes are in task_instance_actions.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Le
from fastapi import Path, Query
from psycopg import AsyncConnection
from pydantic import BaseModel

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import NO_POOL, OPERATORS, TASK_STATES, instance_document, states_asked
from evertick.api.airflow.runs import R, find_run, whose
from evertick.api.auth import F, GuardedRouter, Register
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import dags, gates, listings, tasks
from evertick.db.queries.listings import ListedTask, TaskFilter
from evertick.db.queries.run_lists import MOST_COUNTED, PageRequest
from evertick.db.queries.tasks import AttemptRow, TriggerFacts
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, UserError
from evertick.domain.explain import describe
from evertick.operations.caller import visible_reasons

router = GuardedRouter(tags=["Task Instance"])

T = f"{R}/taskInstances/{{task_id}}"
# In the path of a mapped task's instance, in the query of others.
MapIndex = Annotated[int, Ge(-1), Le(2**31 - 1)]
TryNumber = Annotated[int, Path(ge=0, le=2**31 - 1)]
PLACE = ["run_id", "idx", "map_index"]
ORDER = {
    "id": PLACE,
    "state": ["shown"],
    "duration": ["seconds"],
    "start_date": ["started_at"],
    "end_date": ["finished_at"],
    "map_index": ["map_index"],
    "try_number": ["tries"],
    "logical_date": ["fire_at"],
    "run_after": ["due_at"],
    "data_interval_start": ["fire_at"],
    "data_interval_end": ["fire_at"],
    "rendered_map_index": ["map_index"],
    "operator": ["operator"],
    "task_id": ["task"],
    "dag_id": ["dag"],
    "run_id": ["text_id"],
    "queue": ["queue"],
}
_OUTCOMES = {"success": "success", "skipped": "skipped"}


class InstancesBatch(query.Batch):
    """The request body of the batch list."""

    dag_ids: list[str] | None = None
    dag_run_ids: list[str] | None = None
    task_ids: list[str] | None = None
    state: list[models.TaskInstanceState | None] | None = None
    pool: list[str] | None = None
    queue: list[str] | None = None
    executor: list[str] | None = None


# The states, operators and pools of filters and sort keys have Airflow's names.
_task_filter = partial(TaskFilter, names=TASK_STATES, kinds=OPERATORS, no_pool=NO_POOL)


@router.get(f"{R}/taskInstances", Permission.READ_RUNS, models.TaskInstanceCollectionResponse)
async def get_task_instances(
    dag_id: str, dag_run_id: str, caller: Who, asked: Annotated[query.InstanceQuery, Query()]
) -> dict[str, Any]:
    """List task instances of one run, of all runs of a DAG (`~` as run), or of all DAGs (`~` for both)."""
    order = query.columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        wanted = replace(
            _filter(asked),
            **await where(caller, conn, dag_id, dag_run_id),
            tasks=None if asked.task_id is None else [asked.task_id],
            **query.patterns(asked, _="task_display_name", dag="dag_id", run="run_id"),
            groups=None if asked.task_group_id is None else [f"{asked.task_group_id}."],
        )
        if asked.cursor is not None:
            page, more = await query.read_by_cursor(partial(listings.list_tasks, conn), wanted, asked, order, PLACE)
            return {"task_instances": await instance_documents(conn, page), "next_cursor": more}
        return await _collection(conn, wanted, asked, query.paged(asked, order))


@router.post(f"{R}/taskInstances/list", Permission.READ_RUNS, models.TaskInstanceCollectionResponse)
async def get_task_instances_batch(dag_id: str, dag_run_id: str, body: InstancesBatch, caller: Who) -> dict[str, Any]:
    if dag_id != query.EVERY or dag_run_id != query.EVERY:
        raise UserError("The batch list needs ~ as dag_id and dag_run_id in the path. Name DAGs and runs in the body.")
    asked = body.page(ORDER)
    async with caller.read() as conn:
        wanted = _task_filter(
            dag_ids=await caller.visible_dag_ids(conn),
            dags=body.dag_ids,
            text_ids=body.dag_run_ids,
            tasks=body.task_ids,
            **states_asked([state or "none" for state in body.state or ()]),
            pools=body.pool or None,
            queues=body.queue or None,
            **query.time_ranges(body),
        )
        return await _collection(conn, wanted, body, asked)


@router.get(f"{T}/listMapped", Permission.READ_RUNS, models.TaskInstanceCollectionResponse)
async def get_mapped_task_instances(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, asked: Annotated[query.MappedQuery, Query()]
) -> dict[str, Any]:
    order = query.columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        if not await tasks.by_name(conn, run_id=run.run_id, task=task_id, limit=1):
            raise NotFound(missing(dag_id, dag_run_id, task_id))
        wanted = replace(_filter(asked), run_id=run.run_id, tasks=[task_id], is_mapped=True)
        return await _collection(conn, wanted, asked, query.paged(asked, order))


def _get(path: str, answer: type[BaseModel], *, mapped: str) -> Register:
    """Add a GET of a task instance whose map index is in the query, and one, named `mapped`, with the map index in the path."""

    def add(function: F) -> F:
        router.get(f"{T}{path}", Permission.READ_RUNS, answer)(function)
        return router.get(f"{T}/{{map_index}}{path}", Permission.READ_RUNS, answer, name=mapped)(function)

    return add


@_get("/tries", models.TaskInstanceHistoryCollectionResponse, mapped="get_mapped_task_instance_tries")
async def get_task_instance_tries(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndex = -1
) -> dict[str, Any]:
    found = await _tries(caller, (dag_id, dag_run_id, task_id), map_index)
    return {"task_instances": found, "total_entries": len(found)}


@_get("/tries/{task_try_number}", models.TaskInstanceHistoryResponse, mapped="get_mapped_task_instance_try_details")
async def get_task_instance_try_details(
    dag_id: str, dag_run_id: str, task_id: str, task_try_number: TryNumber, caller: Who, map_index: MapIndex = -1
) -> dict[str, Any]:
    found = await _tries(caller, (dag_id, dag_run_id, task_id), map_index)
    missing = f"The Task Instance `{task_id}` of run `{dag_run_id}` has no try {task_try_number}"
    return query.first_of((each for each in found if each["try_number"] == task_try_number), missing)


@_get("/dependencies", models.TaskDependencyCollectionResponse, mapped="get_task_instance_dependencies_by_map_index")
async def get_task_instance_dependencies(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndex = -1
) -> dict[str, Any]:
    """The reasons why the task instance does not run."""
    async with caller.read() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        reasons = await gates.explain_task(conn, key_of(row))
        found = await visible_reasons(caller, conn, reasons)
    shown = sorted(found, key=lambda each: each.kind) if row.phase in ("waiting", "pending", "retrying") else []
    return {"dependencies": [{"name": each.kind, "reason": describe(each)} for each in shown]}


# After the other words that follow a task's name: they match a map index, too.
@router.get(f"{T}/{{map_index}}", Permission.READ_RUNS, models.TaskInstanceResponse)
async def get_mapped_task_instance(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, caller: Who
) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        return (await instance_documents(conn, [row]))[0]


@router.get(T, Permission.READ_RUNS, models.TaskInstanceResponse)
async def get_task_instance(dag_id: str, dag_run_id: str, task_id: str, caller: Who) -> dict[str, Any]:
    return await get_mapped_task_instance(dag_id, dag_run_id, task_id, -1, caller)


def key_of(row: ListedTask) -> TaskKey:
    return TaskKey(row.run_id, row.idx, row.map_index)


async def instance_documents(conn: AsyncConnection, rows: Sequence[ListedTask]) -> list[dict[str, Any]]:
    kinds = await dags.kinds(conn, sorted({row.version_id for row in rows})) if rows else {}
    documents = [instance_document(row, kinds[row.version_id][row.idx]) for row in rows]
    deferred = [row for row in rows if row.phase == "deferred"]
    if not deferred:
        return documents
    run_ids, idxs = [row.run_id for row in deferred], [row.idx for row in deferred]
    found = await tasks.triggers(conn, run_ids=run_ids, idxs=idxs, map_indexes=[row.map_index for row in deferred])
    of_key = {TaskKey(each.run_id, each.idx, each.map_index): each for each in found}
    return [{**each, **_trigger(of_key.get(key_of(row)))} for row, each in zip(rows, documents, strict=True)]


def _trigger(row: TriggerFacts | None) -> dict[str, Any]:
    """Without its arguments, which may be secrets."""
    if row is None:
        return {}
    shown = {"id": row.trigger_id, "classpath": row.classpath, "kwargs": "{}", "created_date": row.since}
    job = {"id": row.trigger_id, "job_type": "TriggererJob", "state": "running", "hostname": row.host}
    job |= {"start_date": row.started_at, "latest_heartbeat": row.heartbeat_at}
    return {"trigger": {**shown, "queue": row.queue}, "triggerer_job": job if row.runner_id else None}


async def find_instance(
    caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int
) -> ListedTask:
    run = await find_run(caller, conn, *names[:2])
    named = await tasks.by_name(conn, run_id=run.run_id, task=names[2], limit=1)
    rows = await listings.tasks_of(conn, run_id=run.run_id, idxs=sorted({each.idx for each in named}))
    return query.first_of((row for row in rows if row.map_index == map_index), missing(*names, map_index))


def missing(dag_id: str, dag_run_id: str, task_id: str, map_index: int = -1) -> str:
    place = f"dag_id: `{dag_id}`, run_id: `{dag_run_id}`"
    if map_index < 0:
        return f"The Task Instance with {place} and task_id: `{task_id}` was not found"
    return f"The Mapped Task Instance with {place}, task_id: `{task_id}`, and map_index: `{map_index}` was not found"


def _filter(asked: query.MappedQuery) -> TaskFilter:
    return _task_filter(
        **states_asked(["none" if state == "no_status" else str(state) for state in asked.state or ()]),
        pools=asked.pool or None,
        **query.patterns(asked, pool="pool_name", queue="queue_name", operator="operator_name"),
        queues=asked.queue or None,
        operators=asked.operator or None,
        versions=asked.version_number or None,
        tries=asked.try_number or None,
        map_indexes=asked.map_index or None,
        **query.time_ranges(asked),
    )


async def where(caller: ApiCaller, conn: AsyncConnection, dag_id: str, dag_run_id: str) -> dict[str, Any]:
    """The filter for the runs named in the path."""
    if dag_run_id == query.EVERY:
        return await whose(caller, conn, dag_id)
    if dag_id == query.EVERY:
        return {**await whose(caller, conn, dag_id), "text_ids": [dag_run_id]}
    return {"run_id": (await find_run(caller, conn, dag_id, dag_run_id)).run_id}


async def _collection(
    conn: AsyncConnection, wanted: TaskFilter, asked: query.MappedQuery | InstancesBatch, page: PageRequest
) -> dict[str, Any]:
    is_of_other_things = asked.executor or (
        isinstance(asked, query.MappedQuery)
        and (query.contains(asked.rendered_map_index_pattern) or query.begins(asked.rendered_map_index_prefix_pattern))
    )
    found, total = ([], 0) if is_of_other_things else await listings.list_tasks(conn, wanted, page)
    return {
        "task_instances": await instance_documents(conn, found),
        "total_entries": total,
        "total_entries_limit": MOST_COUNTED,
    }


async def _tries(caller: ApiCaller, names: tuple[str, str, str], map_index: int) -> list[dict[str, Any]]:
    async with caller.read() as conn:
        row = await find_instance(caller, conn, names, map_index)
        (document,) = await instance_documents(conn, [row])
        made = await tasks.attempts(conn, key_of(row))
    return [{**document, **_attempt(number, each)} for number, each in enumerate(made, 1)]


def _attempt(number: int, row: AttemptRow) -> dict[str, Any]:
    seconds = (row.finished_at - row.started_at).total_seconds() if row.started_at and row.finished_at else None
    return {
        "try_number": number,
        "state": "running" if row.finished_at is None else _OUTCOMES.get(row.outcome, "failed"),
        "start_date": row.started_at,
        "end_date": row.finished_at,
        "duration": seconds,
        "hostname": row.host,
    }
