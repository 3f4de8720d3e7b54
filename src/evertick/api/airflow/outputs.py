"""Logs and XComs. Every task that returned a value has an XCom for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Header, Query
from fastapi.responses import Response, StreamingResponse
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import of_task
from evertick.api.airflow.task_instances import MapIndex, T, TryNumber, find_instance, key_of, missing, where
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.attempts.body import encode_result
from evertick.db.queries import listings as store
from evertick.db.queries import tasks
from evertick.db.queries.listings import ListedOutput, ListedTask, OutputFilter
from evertick.domain.access import Permission
from evertick.domain.attempt import RESULT_TAG, TaskKey
from evertick.domain.errors import NotFound, StorageUnavailable, UserError
from evertick.engine.runs import NewOutput, put_output
from evertick.logs.format import Line, lines_of
from evertick.operations.paging import encode_cursor, read_cursor
from evertick.operations.tasks import returned_and_named

router = GuardedRouter(tags=["Task Instance"])

RETURN_VALUE = "return_value"
LONGEST_KEY = 200
_CHUNKS = 200
_NDJSON = "application/x-ndjson"
ORDER = {
    "key": ["key"],
    "dag_id": ["dag"],
    "run_id": ["text_id"],
    "task_id": ["task"],
    "map_index": ["map_index"],
    "timestamp": ["finished_at"],
    "run_after": ["due_at"],
}


@query.with_ranges("logical_date", "run_after")
class XComQuery(query.Paged):
    xcom_key: str | None = None
    map_index: Annotated[int | None, Query(ge=-1, le=2**31 - 1)] = None
    xcom_key_pattern: query.Pattern = None
    xcom_key_prefix_pattern: query.Pattern = None
    dag_display_name_pattern: query.Pattern = None
    dag_display_name_prefix_pattern: query.Pattern = None
    run_id_pattern: query.Pattern = None
    run_id_prefix_pattern: query.Pattern = None
    task_id_pattern: query.Pattern = None
    task_id_prefix_pattern: query.Pattern = None
    map_index_filter: query.Small | None = None


class XComCreate(query.Body):
    key: str
    value: Any
    map_index: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1


class XComUpdate(query.Body):
    value: Any
    map_index: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1


@router.get(
    f"{T}/logs/{{try_number}}",
    Permission.READ_LOGS,
    models.TaskInstancesLogResponse,
    responses={200: {"content": {_NDJSON: {"schema": {"type": "string"}}}}},
)
async def get_log(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    try_number: TryNumber,
    caller: Who,
    full_content: bool = False,
    map_index: MapIndex = -1,
    token: Annotated[str | None, Query(max_length=1000)] = None,
    accept: Annotated[str, Header()] = "application/json",
) -> Response | dict[str, Any]:
    """The log of one try: as JSON with a continuation token, completely with `full_content`, or as a stream."""
    async with caller.read() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        made = await tasks.attempts(conn, key_of(row))
    if not 1 <= try_number <= len(made):
        raise NotFound(f"The Task Instance `{task_id}` of run `{dag_run_id}` has no try {try_number}")
    attempt = (key_of(row), made[try_number - 1].epoch)
    if _NDJSON in accept:
        return StreamingResponse(_stream(caller, attempt), media_type=_NDJSON)
    content: list[dict[str, Any]] = []
    after: int | None = None
    async for lines, after_page in _pages(caller, attempt, read_cursor(token, -1)[0]):
        content += map(_document, lines)
        after = after_page
        if not full_content:
            break
    return {"content": content, "continuation_token": None if after is None else encode_cursor(after)}


async def _pages(
    caller: ApiCaller, attempt: tuple[TaskKey, int], after: int = -1
) -> AsyncIterator[tuple[list[Line], int | None]]:
    """The lines of each page of one attempt's log, and where the next page begins. No database connection is held in between."""
    key, epoch = attempt
    is_end = False
    while not is_end:
        found = await caller.log_reader.read(key, after=(epoch, after), limit=_CHUNKS)
        chunks = [chunk for chunk in found if chunk.epoch == epoch]
        is_end = len(chunks) < _CHUNKS
        after = chunks[-1].seq if chunks else after
        lines = [line for each in chunks for line in lines_of(each.content, epoch=epoch, is_late=each.is_late)]
        yield lines, None if is_end else after


async def _stream(caller: ApiCaller, attempt: tuple[TaskKey, int]) -> AsyncIterator[str]:
    try:
        async for lines, _ in _pages(caller, attempt):
            for line in lines:
                yield json.dumps(_document(line)) + "\n"
    except StorageUnavailable as error:
        # The response has started, so report in it that the log is incomplete.
        text = f"The rest of the log cannot be read now: {error}"
        yield json.dumps(_document(Line(attempt[1], None, "MARK", text, False))) + "\n"


@router.get(f"{T}/xcomEntries", Permission.READ_RUNS, models.XComCollectionResponse, tags=["XCom"])
async def get_xcom_entries(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, asked: Annotated[XComQuery, Query()]
) -> dict[str, Any]:
    """List XComs of one task; `~` as task, run or DAG selects all."""
    indexes = {each for each in (asked.map_index, asked.map_index_filter) if each is not None}
    wanted = OutputFilter(
        returned=RETURN_VALUE,
        keys=None if asked.xcom_key is None else [asked.xcom_key],
        **query.patterns(asked, key="xcom_key", _="task_id", run="run_id", dag="dag_display_name"),
        tasks=None if task_id == query.EVERY else [task_id],
        map_indexes=sorted(indexes) or None,
        fire=query.span(asked, "logical_date"),
        due=query.span(asked, "run_after"),
    )
    order = query.columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        place = await where(caller, conn, dag_id, dag_run_id)
        run_id = place.get("run_id") if task_id != query.EVERY else None
        if run_id is not None and not await tasks.by_name(conn, run_id=run_id, task=task_id, limit=1):
            raise NotFound(missing(dag_id, dag_run_id, task_id))
        if len(indexes) > 1:
            return {"xcom_entries": [], "total_entries": 0}
        found, total = await store.list_outputs(conn, replace(wanted, **place), query.paged(asked, order))
    return {"xcom_entries": [_entry(row, row.key) for row in found], "total_entries": total}


@router.post(f"{T}/xcomEntries", Permission.MARK_TASKS, models.XComResponseNative, status_code=201, tags=["XCom"])
async def create_xcom_entry(
    dag_id: str, dag_run_id: str, task_id: str, body: XComCreate, caller: Who
) -> dict[str, Any]:
    """Add an XCom to a task that has succeeded."""
    new = NewOutput(name=_name(body.key), value=storable(body.value), must="new")
    return await _put(caller, (dag_id, dag_run_id, task_id), body.map_index, new)


@router.get(
    f"{T}/xcomEntries/{{xcom_key:path}}",
    Permission.READ_RUNS,
    models.XComResponseNative | models.XComResponseString,
    tags=["XCom"],
)
async def get_xcom_entry(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    xcom_key: str,
    caller: Who,
    map_index: MapIndex = -1,
    deserialize: bool = False,
    stringify: bool = False,
) -> dict[str, Any]:
    async with caller.read() as conn:
        found = await _read(caller, conn, (dag_id, dag_run_id, task_id), map_index, _name(xcom_key))
    return {**found, "value": json.dumps(found["value"])} if stringify else found


@router.patch(f"{T}/xcomEntries/{{xcom_key:path}}", Permission.MARK_TASKS, models.XComResponseNative, tags=["XCom"])
async def update_xcom_entry(
    dag_id: str, dag_run_id: str, task_id: str, xcom_key: str, body: XComUpdate, caller: Who
) -> dict[str, Any]:
    new = NewOutput(name=_name(xcom_key), value=storable(body.value), must="old")
    return await _put(caller, (dag_id, dag_run_id, task_id), body.map_index, new)


@router.delete(f"{T}/xcomEntries/{{xcom_key:path}}", Permission.MARK_TASKS, status_code=204, tags=["XCom"])
async def delete_xcom_entry(
    dag_id: str, dag_run_id: str, task_id: str, xcom_key: str, caller: Who, map_index: MapIndex = -1
) -> None:
    async with caller.write() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        new = NewOutput(name=_name(xcom_key), must="old", is_removed=True)
        await put_output(conn, key_of(row), new, actor=caller.actor)


@router.get(f"{T}/externalLogUrl/{{try_number}}", Permission.READ_LOGS, models.ExternalLogUrlResponse)
async def get_external_log_url(
    dag_id: str, dag_run_id: str, task_id: str, try_number: TryNumber, caller: Who, map_index: MapIndex = -1
) -> dict[str, Any]:
    """Always not found: logs have no external location."""
    async with caller.read() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    raise NotFound("Task logs have no external URL.")


@router.get(f"{T}/links", Permission.READ_RUNS, models.ExtraLinkCollectionResponse, tags=["Extra Links"])
async def get_extra_links(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    caller: Who,
    map_index: MapIndex = -1,
    try_number: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> dict[str, Any]:
    """Always empty: tasks have no extra links."""
    async with caller.read() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    return {"extra_links": {}, "total_entries": 0}


async def _put(caller: ApiCaller, names: tuple[str, str, str], map_index: int, new: NewOutput) -> dict[str, Any]:
    async with caller.write() as conn:
        row = await find_instance(caller, conn, names, map_index)
        await put_output(conn, key_of(row), new, actor=caller.actor)
        return await _read(caller, conn, names, map_index, new.name)


async def _read(
    caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int, name: str | None
) -> dict[str, Any]:
    row = await find_instance(caller, conn, names, map_index)
    key = key_of(row)
    stored = await tasks.result(conn, key)
    value, named = returned_and_named(stored)
    is_there = await tasks.has_result(conn, key) if value is stored else value is not None
    if name is not None:
        value, is_there = named.get(name), name in named
    if not is_there:
        raise NotFound(f"XCom entry with key: `{name or RETURN_VALUE}` not found")
    return {**_entry(row, name), "value": value}


def storable(value: Any) -> Any:
    """Encode a value for storage. Values that look like Evertick's tagged types are refused."""
    text = json.dumps(value)
    if value is None or RESULT_TAG in text:
        raise UserError(f"An XCom value must not be null and must not contain the key {RESULT_TAG!r}.")
    encoded = encode_result(value)
    if encoded.text is None:
        raise UserError(encoded.refusal or "The value cannot be stored.")
    return json.loads(encoded.text)


def _name(key: str) -> str | None:
    """Evertick's output name for an XCom key: None for the return value."""
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise UserError(f"Invalid XCom key. Use 1 to {LONGEST_KEY} printable characters.")
    return None if key == RETURN_VALUE else key


def _entry(row: ListedTask | ListedOutput, name: str | None) -> dict[str, Any]:
    return {
        "key": name if name is not None else RETURN_VALUE,
        "timestamp": row.finished_at or row.started_at or row.due_at,
        **of_task(row),
        "run_id": row.text_id,
    }


def _document(line: Line) -> dict[str, Any]:
    at = line.at.isoformat() if line.at else None
    return {"timestamp": at, "event": line.text, "level": line.level.lower()}
