"""DAG runs: list and read. Changes are in run_actions.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import StreamingResponse
from psycopg import AsyncConnection
from psycopg.types.range import Range
from pydantic import Field

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import RUN_STATES, RUN_TYPES, ours, run_document
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import listings, run_lists, tasks
from evertick.db.queries.run_lists import MOST_COUNTED, ListedRun, Order, PageRequest, RunFilter, between_instants
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, UserError
from evertick.domain.schedules.time_zones import with_zone
from evertick.domain.states import TERMINAL_RUN_STATES
from evertick.operations.caller import is_still_valid
from evertick.operations.paging import encode_cursor, read_cursor

router = GuardedRouter(tags=["DagRun"])

R = "/dags/{dag_id}/dagRuns/{dag_run_id}"
ORDER = {
    "id": ["run_id"],
    "state": ["shown"],
    "dag_id": ["dag"],
    "run_id": ["text_id"],
    "dag_run_id": ["text_id"],
    "logical_date": ["fire_at"],
    # Partitions are found by their keys and dates, and runs are not sorted by them.
    "partition_date": [],
    "run_after": ["due_at"],
    "start_date": ["started_at"],
    "end_date": ["finished_at"],
    "updated_at": ["changed_at"],
    "conf": ["params"],
    "duration": ["seconds"],
}
LONGEST_WATCH_SECONDS = 3600.0


class RunsBatch(query.Batch):
    """The request body of the batch list."""

    dag_ids: list[str] | None = None
    states: list[models.DagRunState | None] | None = None
    conf_contains: Annotated[str | None, Field(max_length=1000)] = None


@router.get("/dags/{dag_id}/dagRuns", Permission.READ_RUNS, models.DAGRunCollectionResponse)
async def get_dag_runs(dag_id: str, caller: Who, asked: Annotated[query.RunQuery, Query()]) -> dict[str, Any]:
    """List runs of one DAG, or of all with `~`, by default oldest first."""
    order = query.columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        wanted = RunFilter(
            **await whose(caller, conn, dag_id),
            states=ours(list(asked.state or ())),
            **_types(asked.run_type),
            versions=asked.dag_version or None,
            **query.patterns(asked, _="run_id", actor="triggering_user_name", dag="dag_id", keys="partition_key"),
            partition=between_instants(asked.partition_date_gte, None, asked.partition_date_lte, None),
            params_like=query.plainly_contains(asked.conf_contains),
            asset_like=query.plainly_contains(asked.consuming_asset_pattern),
            names=RUN_STATES,
            **query.time_ranges(asked),
        )
        if asked.bundle_version is not None:  # Evertick has no bundles of versions
            return _collection([], 0)
        if asked.cursor is not None:
            if [column for column, _ in order] == ["due_at"]:
                page, more = await _read_by_due(conn, wanted, asked, order)
            else:
                read = partial(run_lists.list_runs, conn)
                page, more = await query.read_by_cursor(read, wanted, asked, order, ORDER["id"])
            return {"dag_runs": [run_document(row) for row in page], "next_cursor": more}
        found, total = await run_lists.list_runs(conn, wanted, query.paged(asked, order))
    return _collection(found, total)


@router.post("/dags/{dag_id}/dagRuns/list", Permission.READ_RUNS, models.DAGRunCollectionResponse)
async def get_list_dag_runs_batch(dag_id: str, body: RunsBatch, caller: Who) -> dict[str, Any]:
    if dag_id != query.EVERY:
        raise UserError("The batch list needs ~ as dag_id in the path. Name DAGs in dag_ids.")
    asked = body.page(ORDER)
    async with caller.read() as conn:
        wanted = RunFilter(
            **await whose(caller, conn, dag_id),
            dags=body.dag_ids,
            states=ours([state for state in body.states or () if state is not None]),
            params_like=query.plainly_contains(body.conf_contains),
            names=RUN_STATES,
            **query.time_ranges(body),
        )
        return _collection(*await run_lists.list_runs(conn, wanted, asked))


@router.get(R, Permission.READ_RUNS, models.DAGRunResponse)
async def get_dag_run(dag_id: str, dag_run_id: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return run_document(await find_run(caller, conn, dag_id, dag_run_id))


@router.get(
    f"{R}/wait",
    Permission.READ_RUNS,
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
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
    # As in Airflow, without a media type: the client refuses application/x-ndjson, and reads only one line of JSON.
    return StreamingResponse(_watch(caller, (dag_id, dag_run_id), max(interval, 0.1), result or []))


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
    if dag_id == query.EVERY:
        return {"dag_ids": await caller.visible_dag_ids(conn)}
    return {"dag_id": (await caller.dag(conn, dag_id)).dag_id}


async def _read_by_due(
    conn: AsyncConnection, wanted: RunFilter, asked: query.RunQuery, order: Order
) -> tuple[list[ListedRun], str | None]:
    """The page after the cursor in the order of due times, and the next cursor: the last due time, and the number of runs with it
    on the pages so far. Such runs are ordered by id, so new runs in the meantime cause neither duplicates nor gaps."""
    at, seen = _read_due_cursor(asked.cursor) if asked.cursor else (None, 0)
    if at is not None:
        wanted = replace(wanted, due=_due_from(wanted.due, at, is_down=order[0][1]))
    size = query.page_size(asked.limit)
    request = PageRequest(limit=size + 1, offset=seen, order=order, is_counted=False)
    found, _ = await run_lists.list_runs(conn, wanted, request)
    page = found[:size]
    if len(found) <= size:
        return page, None
    last = page[-1].due_at
    seen = sum(row.due_at == last for row in page) + (seen if last == at else 0)
    return page, encode_cursor(last.isoformat(), seen)


def _read_due_cursor(cursor: str) -> tuple[datetime, int]:
    key: tuple[Any, ...] = read_cursor(cursor, "", 0)
    text, seen = key
    try:
        return with_zone(datetime.fromisoformat(text)), min(max(seen, 0), query.MOST_SKIPPED)
    except (ValueError, OverflowError):
        raise UserError("The cursor is not one of this list: use the next_cursor of a page.") from None


def _due_from(due: Range[datetime] | None, at: datetime, *, is_down: bool) -> Range[datetime]:
    """The part of the range that is not before `at`, in that direction."""
    known: Range[datetime] = due or Range()
    if at not in known:
        raise UserError("The cursor is not one of this list: use the next_cursor of a page with the same filters.")
    if is_down:
        return Range(known.lower, at, "[]" if known.lower_inc else "(]")
    return Range(at, known.upper, "[]" if known.upper_inc else "[)")


def _types(asked: list[models.DagRunType] | None) -> dict[str, Any]:
    types = [each for each in asked if each in RUN_TYPES] if asked else None
    return {"types": types, "kinds": None if types is None else sorted({RUN_TYPES[each] for each in types})}


def _collection(found: list[ListedRun], total: int) -> dict[str, Any]:
    return {
        "dag_runs": [run_document(row) for row in found],
        "total_entries": total,
        "total_entries_limit": MOST_COUNTED,
    }
