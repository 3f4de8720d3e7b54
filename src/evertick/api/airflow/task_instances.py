"""Task instances: list, read, tries and blocking dependencies. Changes are in instance_changes.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from fastapi import APIRouter, Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.labels import NO_POOL, OPERATORS, TASK_STATES, instance_document, states_asked
from evertick.api.airflow.models import (
    TaskDependencyCollectionResponse,
    TaskInstanceCollectionResponse,
    TaskInstanceHistoryCollectionResponse,
    TaskInstanceHistoryResponse,
    TaskInstanceResponse,
    TaskInstanceState,
)
from evertick.api.airflow.query import (
    EVERY,
    MOST_ITEMS,
    Body,
    InstanceQuery,
    MappedQuery,
    Times,
    begins,
    columns,
    contains,
    page_size,
    paged,
    spans_of,
)
from evertick.api.airflow.runs import R, find_run, whose
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import dags, gates, listings, tasks
from evertick.db.queries.listings import ListedTask, TaskFilter
from evertick.db.queries.run_lists import MOST_COUNTED, PageRequest
from evertick.db.queries.tasks import AttemptRow
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, UserError
from evertick.domain.explain import describe
from evertick.operations.caller import visible_reasons
from evertick.operations.paging import encode_cursor, read_cursor

router = APIRouter(route_class=GuardedRoute, tags=["Task Instance"])

T = f"{R}/taskInstances/{{task_id}}"
MapIndex = Annotated[int, Path(ge=-1, le=2**31 - 1)]
MapIndexAsked = Annotated[int, Query(ge=-1, le=2**31 - 1)]
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


class InstancesBatch(Times, Body):
    """The request body of the batch list."""

    dag_ids: list[str] | None = None
    dag_run_ids: list[str] | None = None
    task_ids: list[str] | None = None
    state: list[TaskInstanceState | None] | None = None
    pool: list[str] | None = None
    queue: list[str] | None = None
    executor: list[str] | None = None
    page_offset: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    page_limit: Annotated[int, Field(ge=0, le=2**63 - 1)] = MOST_ITEMS
    order_by: str | None = None


class Labels(TypedDict):
    """Evertick's names for filters and sort keys."""

    names: Any
    kinds: Any
    no_pool: str


WORDS = Labels(names=TASK_STATES, kinds=OPERATORS, no_pool=NO_POOL)


@router.get(f"{R}/taskInstances", response_model=TaskInstanceCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_task_instances(
    dag_id: str, dag_run_id: str, caller: Who, asked: Annotated[InstanceQuery, Query()]
) -> dict[str, Any]:
    """List task instances of one run, of all runs of a DAG (`~` as run), or of all DAGs (`~` for both)."""
    order = columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        wanted = replace(
            _filter(asked),
            **await where(caller, conn, dag_id, dag_run_id),
            tasks=None if asked.task_id is None else [asked.task_id],
            like=contains(asked.task_display_name_pattern),
            heads=begins(asked.task_display_name_prefix_pattern),
            groups=None if asked.task_group_id is None else [f"{asked.task_group_id}."],
            dag_like=contains(asked.dag_id_pattern),
            dag_heads=begins(asked.dag_id_prefix_pattern),
            run_like=contains(asked.run_id_pattern),
            run_heads=begins(asked.run_id_prefix_pattern),
        )
        if asked.cursor is not None:
            return await _by_cursor(conn, wanted, asked, order)
        return await _collection(conn, wanted, asked, paged(asked, order))


@router.post(f"{R}/taskInstances/list", response_model=TaskInstanceCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_task_instances_batch(dag_id: str, dag_run_id: str, body: InstancesBatch, caller: Who) -> dict[str, Any]:
    if dag_id != EVERY or dag_run_id != EVERY:
        raise UserError("The batch list needs ~ as dag_id and dag_run_id in the path. Name DAGs and runs in the body.")
    order = columns([body.order_by] if body.order_by else None, ORDER)
    async with caller.read() as conn:
        wanted = TaskFilter(
            dag_ids=await caller.visible_dag_ids(conn),
            dags=body.dag_ids,
            text_ids=body.dag_run_ids,
            tasks=body.task_ids,
            **states_asked([state or "none" for state in body.state or ()]),
            pools=body.pool or None,
            queues=body.queue or None,
            **WORDS,
            **spans_of(body),
        )
        asked = PageRequest(limit=page_size(body.page_limit), offset=body.page_offset, order=order)
        return await _collection(conn, wanted, body, asked)


@router.get(T, response_model=TaskInstanceResponse)
@requires(Permission.READ_RUNS)
async def get_task_instance(dag_id: str, dag_run_id: str, task_id: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), -1)
        return (await instance_documents(conn, [row]))[0]


@router.get(f"{T}/listMapped", response_model=TaskInstanceCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_mapped_task_instances(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, asked: Annotated[MappedQuery, Query()]
) -> dict[str, Any]:
    order = columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        if not await tasks.by_name(conn, run_id=run.run_id, task=task_id, limit=1):
            raise missing(dag_id, dag_run_id, task_id)
        wanted = replace(_filter(asked), run_id=run.run_id, tasks=[task_id], is_mapped=True)
        return await _collection(conn, wanted, asked, paged(asked, order))


@router.get(f"{T}/tries", response_model=TaskInstanceHistoryCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_task_instance_tries(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndexAsked = -1
) -> dict[str, Any]:
    found = await _tries(caller, (dag_id, dag_run_id, task_id), map_index)
    return {"task_instances": found, "total_entries": len(found)}


@router.get(f"{T}/tries/{{task_try_number}}", response_model=TaskInstanceHistoryResponse)
@requires(Permission.READ_RUNS)
async def get_task_instance_try_details(
    dag_id: str, dag_run_id: str, task_id: str, task_try_number: TryNumber, caller: Who, map_index: MapIndexAsked = -1
) -> dict[str, Any]:
    return await _try(caller, (dag_id, dag_run_id, task_id), map_index, task_try_number)


@router.get(f"{T}/dependencies", response_model=TaskDependencyCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_task_instance_dependencies(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, map_index: MapIndexAsked = -1
) -> dict[str, Any]:
    """The reasons why the task instance does not run."""
    return await _dependencies(caller, (dag_id, dag_run_id, task_id), map_index)


@router.get(f"{T}/{{map_index}}", response_model=TaskInstanceResponse)
@requires(Permission.READ_RUNS)
async def get_mapped_task_instance(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, caller: Who
) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        return (await instance_documents(conn, [row]))[0]


@router.get(f"{T}/{{map_index}}/tries", response_model=TaskInstanceHistoryCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_mapped_task_instance_tries(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, caller: Who
) -> dict[str, Any]:
    found = await _tries(caller, (dag_id, dag_run_id, task_id), map_index)
    return {"task_instances": found, "total_entries": len(found)}


@router.get(f"{T}/{{map_index}}/tries/{{task_try_number}}", response_model=TaskInstanceHistoryResponse)
@requires(Permission.READ_RUNS)
async def get_mapped_task_instance_try_details(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, task_try_number: TryNumber, caller: Who
) -> dict[str, Any]:
    return await _try(caller, (dag_id, dag_run_id, task_id), map_index, task_try_number)


@router.get(f"{T}/{{map_index}}/dependencies", response_model=TaskDependencyCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_task_instance_dependencies_by_map_index(
    dag_id: str, dag_run_id: str, task_id: str, map_index: MapIndex, caller: Who
) -> dict[str, Any]:
    return await _dependencies(caller, (dag_id, dag_run_id, task_id), map_index)


async def instance_documents(conn: AsyncConnection, rows: Sequence[ListedTask]) -> list[dict[str, Any]]:
    kinds = await dags.kinds(conn, sorted({row.version_id for row in rows})) if rows else {}
    return [instance_document(row, kinds[row.version_id][row.idx]) for row in rows]


async def find_instance(
    caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int
) -> ListedTask:
    run = await find_run(caller, conn, *names[:2])
    named = await tasks.by_name(conn, run_id=run.run_id, task=names[2], limit=1)
    for row in await listings.tasks_of(conn, run_id=run.run_id, idxs={each.idx for each in named}):
        if row.map_index == map_index:
            return row
    raise missing(*names)


def missing(dag_id: str, dag_run_id: str, task_id: str) -> NotFound:
    return NotFound(
        f"The Task Instance with dag_id: `{dag_id}`, run_id: `{dag_run_id}` and task_id: `{task_id}` was not found"
    )


def _filter(asked: MappedQuery) -> TaskFilter:
    return TaskFilter(
        **states_asked(["none" if state == "no_status" else str(state) for state in asked.state or ()]),
        pools=asked.pool or None,
        pool_like=contains(asked.pool_name_pattern),
        pool_heads=begins(asked.pool_name_prefix_pattern),
        queues=asked.queue or None,
        queue_like=contains(asked.queue_name_pattern),
        queue_heads=begins(asked.queue_name_prefix_pattern),
        operators=asked.operator or None,
        operator_like=contains(asked.operator_name_pattern),
        operator_heads=begins(asked.operator_name_prefix_pattern),
        versions=asked.version_number or None,
        tries=asked.try_number or None,
        map_indexes=asked.map_index or None,
        **WORDS,
        **spans_of(asked),
    )


async def where(caller: ApiCaller, conn: AsyncConnection, dag_id: str, dag_run_id: str) -> dict[str, Any]:
    """The filter for the runs named in the path."""
    if dag_run_id == EVERY:
        return await whose(caller, conn, dag_id)
    if dag_id == EVERY:
        return {**await whose(caller, conn, dag_id), "text_ids": [dag_run_id]}
    return {"run_id": (await find_run(caller, conn, dag_id, dag_run_id)).run_id}


async def _collection(
    conn: AsyncConnection, wanted: TaskFilter, asked: MappedQuery | InstancesBatch, page: PageRequest
) -> dict[str, Any]:
    is_of_other_things = asked.executor or (
        isinstance(asked, MappedQuery)
        and (contains(asked.rendered_map_index_pattern) or begins(asked.rendered_map_index_prefix_pattern))
    )
    found, total = ([], 0) if is_of_other_things else await listings.list_tasks(conn, wanted, page)
    return {
        "task_instances": await instance_documents(conn, found),
        "total_entries": total,
        "total_entries_limit": MOST_COUNTED,
    }


async def _by_cursor(
    conn: AsyncConnection, wanted: TaskFilter, asked: InstanceQuery, order: list[tuple[str, bool]]
) -> dict[str, Any]:
    """The page after the cursor, ordered by run number and task index."""
    up, down = ([(column, is_down) for column in PLACE] for is_down in (False, True))
    if order not in ([], up, down):
        raise UserError("A cursor supports only order_by id or -id. Omit order_by, or use offset.")
    if asked.cursor:
        at = list(read_cursor(asked.cursor, 0, 0, 0))
        wanted = replace(wanted, before=at) if order == down else replace(wanted, after=at)
    size = page_size(asked.limit)
    found, _ = await listings.list_tasks(conn, wanted, PageRequest(limit=size + 1, order=order, is_counted=False))
    page = found[:size]
    more = encode_cursor(page[-1].run_id, page[-1].idx, page[-1].map_index) if len(found) > size else None
    return {"task_instances": await instance_documents(conn, page), "next_cursor": more}


async def _dependencies(caller: ApiCaller, names: tuple[str, str, str], map_index: int) -> dict[str, Any]:
    async with caller.read() as conn:
        row = await find_instance(caller, conn, names, map_index)
        found = await visible_reasons(caller, conn, await gates.why(conn, TaskKey(row.run_id, row.idx, row.map_index)))
    told = sorted(found, key=lambda each: each.kind) if row.phase in ("waiting", "pending", "retrying") else []
    return {"dependencies": [{"name": each.kind, "reason": describe(each)} for each in told]}


async def _try(caller: ApiCaller, names: tuple[str, str, str], map_index: int, number: int) -> dict[str, Any]:
    for each in await _tries(caller, names, map_index):
        if each["try_number"] == number:
            return each
    raise NotFound(f"The Task Instance `{names[2]}` of run `{names[1]}` has no try {number}")


async def _tries(caller: ApiCaller, names: tuple[str, str, str], map_index: int) -> list[dict[str, Any]]:
    async with caller.read() as conn:
        row = await find_instance(caller, conn, names, map_index)
        (document,) = await instance_documents(conn, [row])
        made = await tasks.attempts(conn, TaskKey(row.run_id, row.idx, row.map_index))
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
