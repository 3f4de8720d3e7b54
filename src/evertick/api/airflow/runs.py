"""DAG runs: list and read. Changes are in run_changes.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.labels import RUN_STATES, RUN_TYPES, ours, run_document
from evertick.api.airflow.models import DAGRunCollectionResponse, DAGRunResponse, DagRunState, DagRunType
from evertick.api.airflow.query import (
    EVERY,
    MOST_ITEMS,
    Body,
    RunQuery,
    Times,
    begins,
    columns,
    contains,
    page_size,
    paged,
    plainly_contains,
    spans_of,
)
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import listings, run_lists, tasks
from evertick.db.queries.run_lists import MOST_COUNTED, ListedRun, PageRequest, RunFilter
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, UserError
from evertick.domain.states import TERMINAL_RUN_STATES
from evertick.operations.caller import is_still_valid
from evertick.operations.paging import encode_cursor, read_cursor

router = APIRouter(route_class=GuardedRoute, tags=["DagRun"])

R = "/dags/{dag_id}/dagRuns/{dag_run_id}"
ORDER = {
    "id": ["run_id"],
    "state": ["shown"],
    "dag_id": ["dag"],
    "run_id": ["text_id"],
    "dag_run_id": ["text_id"],
    "logical_date": ["fire_at"],
    # Evertick has no partitions: sorting by them has no effect.
    "partition_date": [],
    "run_after": ["due_at"],
    "start_date": ["started_at"],
    "end_date": ["finished_at"],
    "updated_at": ["changed_at"],
    "conf": ["params"],
    "duration": ["seconds"],
}
LONGEST_WATCH_SECONDS = 3600.0


class RunsBatch(Times, Body):
    """The request body of the batch list."""

    order_by: str | None = None
    page_offset: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    page_limit: Annotated[int, Field(ge=0, le=2**63 - 1)] = MOST_ITEMS
    dag_ids: list[str] | None = None
    states: list[DagRunState | None] | None = None
    conf_contains: Annotated[str | None, Field(max_length=1000)] = None


@router.get("/dags/{dag_id}/dagRuns", response_model=DAGRunCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_dag_runs(dag_id: str, caller: Who, asked: Annotated[RunQuery, Query()]) -> dict[str, Any]:
    """List runs of one DAG, or of all with `~`, by default oldest first."""
    order = columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        wanted = RunFilter(
            **await whose(caller, conn, dag_id),
            states=ours(list(asked.state or ())),
            **_types(asked.run_type),
            versions=asked.dag_version or None,
            like=contains(asked.run_id_pattern),
            heads=begins(asked.run_id_prefix_pattern),
            actor_like=contains(asked.triggering_user_name_pattern),
            actor_heads=begins(asked.triggering_user_name_prefix_pattern),
            dag_like=contains(asked.dag_id_pattern),
            dag_heads=begins(asked.dag_id_prefix_pattern),
            params_like=plainly_contains(asked.conf_contains),
            asset_like=plainly_contains(asked.consuming_asset_pattern),
            names=RUN_STATES,
            **spans_of(asked),
        )
        if _asks_for_what_is_not_here(asked):
            return _collection([], 0)
        if asked.cursor is not None:
            return await _by_cursor(conn, wanted, asked, order)
        found, total = await run_lists.list_runs(conn, wanted, paged(asked, order))
    return _collection(found, total)


@router.post("/dags/{dag_id}/dagRuns/list", response_model=DAGRunCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_list_dag_runs_batch(dag_id: str, body: RunsBatch, caller: Who) -> dict[str, Any]:
    if dag_id != EVERY:
        raise UserError("The batch list needs ~ as dag_id in the path. Name DAGs in dag_ids.")
    order = columns([body.order_by] if body.order_by else None, ORDER)
    async with caller.read() as conn:
        wanted = RunFilter(
            **await whose(caller, conn, dag_id),
            dags=body.dag_ids,
            states=ours([state for state in body.states or () if state is not None]),
            params_like=plainly_contains(body.conf_contains),
            names=RUN_STATES,
            **spans_of(body),
        )
        asked = PageRequest(limit=page_size(body.page_limit), offset=body.page_offset, order=order)
        return _collection(*await run_lists.list_runs(conn, wanted, asked))


@router.get(R, response_model=DAGRunResponse)
@requires(Permission.READ_RUNS)
async def get_dag_run(dag_id: str, dag_run_id: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.get(
    f"{R}/wait",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
@requires(Permission.READ_RUNS)
async def wait_dag_run_until_finished(
    dag_id: str,
    dag_run_id: str,
    caller: Who,
    interval: Annotated[float, Query(gt=0, le=3600)],
    result: Annotated[list[str] | None, Query(max_length=100)] = None,
) -> StreamingResponse:
    """Stream the run's state every `interval` seconds until it ends. The last line contains the results of the named tasks."""
    async with caller.read() as conn:
        await find_run(caller, conn, dag_id, dag_run_id)
    return StreamingResponse(
        _watch(caller, (dag_id, dag_run_id), max(interval, 0.1), result or []), media_type="application/x-ndjson"
    )


async def _watch(
    caller: ApiCaller, names: tuple[str, str], interval_seconds: float, result: list[str]
) -> AsyncIterator[str]:
    """Poll the run. Between polls no connection is held; each poll checks the caller's permission again."""
    for _ in range(max(1, int(LONGEST_WATCH_SECONDS / interval_seconds))):
        async with caller.read() as conn:
            if not await is_still_valid(caller, conn):
                return
            run = await find_run(caller, conn, *names)
            told: dict[str, Any] = {"state": RUN_STATES[run.state]}
            is_over = run.state in TERMINAL_RUN_STATES
            if is_over and result:
                told["results"] = {name: await _result(conn, run.run_id, name) for name in result}
        yield json.dumps(told) + "\n"
        if is_over:
            return
        await asyncio.sleep(interval_seconds)


async def _result(conn: AsyncConnection, run_id: int, task: str) -> object:
    """The return value of a task; for a mapped task, the list of its instances' values."""
    rows = await tasks.by_name(conn, run_id=run_id, task=task)
    values = [await tasks.result(conn, TaskKey(run_id, row.idx, row.map_index)) for row in rows]
    is_mapped = any(row.map_index >= 0 for row in rows)
    return values if is_mapped else values[0] if values else None


async def find_run(caller: ApiCaller, conn: AsyncConnection, dag_id: str, dag_run_id: str) -> ListedRun:
    row = await caller.dag(conn, dag_id)
    run = await listings.find_run(conn, dag_id=row.dag_id, text_id=dag_run_id)
    if run is None:
        raise NotFound(f"The DagRun with dag_id: `{dag_id}` and run_id: `{dag_run_id}` was not found")
    return run


async def whose(caller: ApiCaller, conn: AsyncConnection, dag_id: str) -> dict[str, Any]:
    """The filter for the DAG in the path: one DAG, or with `~` all that the caller may see."""
    if dag_id == EVERY:
        return {"dag_ids": await caller.visible_dag_ids(conn)}
    return {"dag_id": (await caller.dag(conn, dag_id)).dag_id}


async def _by_cursor(
    conn: AsyncConnection, wanted: RunFilter, asked: RunQuery, order: list[tuple[str, bool]]
) -> dict[str, Any]:
    """The page after the cursor, by run number. New runs in the meantime cause neither duplicates nor gaps."""
    if order not in ([], [("run_id", False)], [("run_id", True)]):
        raise UserError("A cursor supports only order_by id or -id. Omit order_by, or use offset.")
    is_down = order == [("run_id", True)]
    if asked.cursor:
        (at,) = read_cursor(asked.cursor, 0)
        wanted = replace(wanted, before=at) if is_down else replace(wanted, after=at)
    size = page_size(asked.limit)
    found, _ = await run_lists.list_runs(conn, wanted, PageRequest(limit=size + 1, order=order, is_counted=False))
    page = found[:size]
    more = encode_cursor(page[-1].run_id) if len(found) > size else None
    return {"dag_runs": [run_document(row) for row in page], "next_cursor": more}


def _types(asked: list[DagRunType] | None) -> dict[str, Any]:
    types = [each for each in asked if each in RUN_TYPES] if asked else None
    return {"types": types, "kinds": None if types is None else sorted({RUN_TYPES[each] for each in types})}


def _asks_for_what_is_not_here(asked: RunQuery) -> bool:
    return any(
        each is not None
        for each in (
            asked.partition_date_gte,
            asked.partition_date_lte,
            begins(asked.partition_key_prefix_pattern),
            contains(asked.partition_key_pattern),
            asked.bundle_version,
        )
    )


def _collection(found: list[ListedRun], total: int) -> dict[str, Any]:
    return {
        "dag_runs": [run_document(row) for row in found],
        "total_entries": total,
        "total_entries_limit": MOST_COUNTED,
    }
