"""Logs and XComs. Every task that returned a value has an XCom for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response, StreamingResponse
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.models import (
    ExternalLogUrlResponse,
    ExtraLinkCollectionResponse,
    TaskInstancesLogResponse,
    XComCollectionResponse,
    XComResponseNative,
    XComResponseString,
)
from evertick.api.airflow.query import EVERY, Body, Paged, Pattern, Small, begins, columns, contains, paged, span
from evertick.api.airflow.task_instances import MapIndexAsked, T, TryNumber, find_instance, missing, where
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import ApiCaller, Who
from evertick.attempts.body import encode_result
from evertick.db.queries import listings as store
from evertick.db.queries import tasks
from evertick.db.queries.listings import ListedOutput, ListedTask, NewOutput, OutputFilter
from evertick.domain.access import Permission
from evertick.domain.attempt import RESULT_TAG, TaskKey
from evertick.domain.errors import NotFound, StorageUnavailable, UserError
from evertick.engine.runs import put_output
from evertick.logs.format import Line, lines_of
from evertick.operations.paging import encode_cursor, read_cursor

router = APIRouter(route_class=GuardedRoute, tags=["Task Instance"])

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


class XComQuery(Paged):
    xcom_key: str | None = None
    map_index: Annotated[int | None, Query(ge=-1, le=2**31 - 1)] = None
    xcom_key_pattern: Pattern = None
    xcom_key_prefix_pattern: Pattern = None
    dag_display_name_pattern: Pattern = None
    dag_display_name_prefix_pattern: Pattern = None
    run_id_pattern: Pattern = None
    run_id_prefix_pattern: Pattern = None
    task_id_pattern: Pattern = None
    task_id_prefix_pattern: Pattern = None
    map_index_filter: Small | None = None
    logical_date_gte: datetime | None = None
    logical_date_gt: datetime | None = None
    logical_date_lte: datetime | None = None
    logical_date_lt: datetime | None = None
    run_after_gte: datetime | None = None
    run_after_gt: datetime | None = None
    run_after_lte: datetime | None = None
    run_after_lt: datetime | None = None


class XComCreate(Body):
    key: str
    value: Any
    map_index: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1


class XComUpdate(Body):
    value: Any
    map_index: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1


@router.get(
    f"{T}/logs/{{try_number}}",
    response_model=TaskInstancesLogResponse,
    responses={200: {"content": {_NDJSON: {"schema": {"type": "string"}}}}},
)
@requires(Permission.READ_LOGS)
async def get_log(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    try_number: TryNumber,
    caller: Who,
    full_content: bool = False,
    map_index: MapIndexAsked = -1,
    token: Annotated[str | None, Query(max_length=1000)] = None,
    accept: Annotated[str, Header()] = "application/json",
) -> Response | dict[str, Any]:
    """The log of one try: as JSON with a continuation token, completely with `full_content`, or as a stream."""
    async with caller.read() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        key = TaskKey(row.run_id, row.idx, row.map_index)
        made = await tasks.attempts(conn, key)
    if not 1 <= try_number <= len(made):
        raise NotFound(f"The Task Instance `{task_id}` of run `{dag_run_id}` has no try {try_number}")
    epoch = made[try_number - 1].epoch
    if _NDJSON in accept:
        return StreamingResponse(_stream(caller, key, epoch), media_type=_NDJSON)
    after, content = read_cursor(token, -1)[0], list[dict[str, Any]]()
    while True:
        found = await caller.log_reader.read(key, after=(epoch, after), limit=_CHUNKS)
        chunks = [chunk for chunk in found if chunk.epoch == epoch]
        for chunk in chunks:
            content += [_document(line) for line in lines_of(chunk.content, epoch=epoch, is_late=chunk.is_late)]
        is_end = len(chunks) < _CHUNKS
        after = chunks[-1].seq if chunks else after
        if is_end or not full_content:
            return {"content": content, "continuation_token": None if is_end else encode_cursor(after)}


async def _stream(caller: ApiCaller, key: TaskKey, epoch: int) -> AsyncIterator[str]:
    """Stream the log. No database connection is held while the client reads."""
    after = -1
    while True:
        try:
            read = await caller.log_reader.read(key, after=(epoch, after), limit=_CHUNKS)
        except StorageUnavailable as error:
            # The response has started, so report in it that the log is incomplete.
            yield (
                json.dumps(
                    _document(Line(epoch, None, "MARK", f"The rest of the log cannot be read now: {error}", False))
                )
                + "\n"
            )
            return
        found = [each for each in read if each.epoch == epoch]
        for chunk in found:
            after = chunk.seq
            for line in lines_of(chunk.content, epoch=epoch, is_late=chunk.is_late):
                yield json.dumps(_document(line)) + "\n"
        if len(found) < _CHUNKS:
            return


@router.get(f"{T}/xcomEntries", response_model=XComCollectionResponse, tags=["XCom"])
@requires(Permission.READ_RUNS)
async def get_xcom_entries(
    dag_id: str, dag_run_id: str, task_id: str, caller: Who, asked: Annotated[XComQuery, Query()]
) -> dict[str, Any]:
    """List XComs of one task; `~` as task, run or DAG selects all."""
    indexes = {each for each in (asked.map_index, asked.map_index_filter) if each is not None}
    wanted = OutputFilter(
        returned=RETURN_VALUE,
        keys=None if asked.xcom_key is None else [asked.xcom_key],
        key_like=contains(asked.xcom_key_pattern),
        key_heads=begins(asked.xcom_key_prefix_pattern),
        tasks=None if task_id == EVERY else [task_id],
        map_indexes=sorted(indexes) or None,
        like=contains(asked.task_id_pattern),
        heads=begins(asked.task_id_prefix_pattern),
        run_like=contains(asked.run_id_pattern),
        run_heads=begins(asked.run_id_prefix_pattern),
        dag_like=contains(asked.dag_display_name_pattern),
        dag_heads=begins(asked.dag_display_name_prefix_pattern),
        fire=span(asked, "logical_date"),
        due=span(asked, "run_after"),
    )
    order = columns(asked.order_by, ORDER)
    async with caller.read() as conn:
        place = await where(caller, conn, dag_id, dag_run_id)
        if task_id != EVERY and not await _has_task(conn, place, task_id):
            raise missing(dag_id, dag_run_id, task_id)
        if len(indexes) > 1:
            return {"xcom_entries": [], "total_entries": 0}
        found, total = await store.list_outputs(conn, replace(wanted, **place), paged(asked, order))
    return {"xcom_entries": [_entry(row, row.key) for row in found], "total_entries": total}


@router.post(f"{T}/xcomEntries", response_model=XComResponseNative, status_code=201, tags=["XCom"])
@requires(Permission.MARK_TASKS)
async def create_xcom_entry(
    dag_id: str, dag_run_id: str, task_id: str, body: XComCreate, caller: Who
) -> dict[str, Any]:
    """Add an XCom to a task that has succeeded."""
    new = NewOutput(name=_name(body.key), value=storable(body.value), must="new")
    return await _put(caller, (dag_id, dag_run_id, task_id), body.map_index, new)


@router.get(f"{T}/xcomEntries/{{xcom_key:path}}", response_model=XComResponseNative | XComResponseString, tags=["XCom"])
@requires(Permission.READ_RUNS)
async def get_xcom_entry(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    xcom_key: str,
    caller: Who,
    map_index: MapIndexAsked = -1,
    deserialize: bool = False,
    stringify: bool = False,
) -> dict[str, Any]:
    async with caller.read() as conn:
        found = await _read(caller, conn, (dag_id, dag_run_id, task_id), map_index, _name(xcom_key))
    return {**found, "value": json.dumps(found["value"])} if stringify else found


@router.patch(f"{T}/xcomEntries/{{xcom_key:path}}", response_model=XComResponseNative, tags=["XCom"])
@requires(Permission.MARK_TASKS)
async def update_xcom_entry(
    dag_id: str, dag_run_id: str, task_id: str, xcom_key: str, body: XComUpdate, caller: Who
) -> dict[str, Any]:
    new = NewOutput(name=_name(xcom_key), value=storable(body.value), must="old")
    return await _put(caller, (dag_id, dag_run_id, task_id), body.map_index, new)


@router.delete(f"{T}/xcomEntries/{{xcom_key:path}}", status_code=204, tags=["XCom"])
@requires(Permission.MARK_TASKS)
async def delete_xcom_entry(
    dag_id: str, dag_run_id: str, task_id: str, xcom_key: str, caller: Who, map_index: MapIndexAsked = -1
) -> None:
    async with caller.write() as conn:
        row = await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
        new = NewOutput(name=_name(xcom_key), must="old", is_removed=True)
        await put_output(conn, TaskKey(row.run_id, row.idx, row.map_index), new, actor=caller.actor)


@router.get(f"{T}/externalLogUrl/{{try_number}}", response_model=ExternalLogUrlResponse)
@requires(Permission.READ_LOGS)
async def get_external_log_url(
    dag_id: str, dag_run_id: str, task_id: str, try_number: TryNumber, caller: Who, map_index: MapIndexAsked = -1
) -> dict[str, Any]:
    """Always not found: logs have no external location."""
    async with caller.read() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    raise NotFound("Task logs have no external URL.")


@router.get(f"{T}/links", response_model=ExtraLinkCollectionResponse, tags=["Extra Links"])
@requires(Permission.READ_RUNS)
async def get_extra_links(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    caller: Who,
    map_index: MapIndexAsked = -1,
    try_number: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> dict[str, Any]:
    """Always empty: tasks have no extra links."""
    async with caller.read() as conn:
        await find_instance(caller, conn, (dag_id, dag_run_id, task_id), map_index)
    return {"extra_links": {}, "total_entries": 0}


async def _has_task(conn: AsyncConnection, place: dict[str, Any], task: str) -> bool:
    """Whether the task exists: in the run's version, or with `~` in any version."""
    return "run_id" not in place or bool(await tasks.by_name(conn, run_id=place["run_id"], task=task, limit=1))


async def _put(caller: ApiCaller, names: tuple[str, str, str], map_index: int, new: NewOutput) -> dict[str, Any]:
    async with caller.write() as conn:
        row = await find_instance(caller, conn, names, map_index)
        await put_output(conn, TaskKey(row.run_id, row.idx, row.map_index), new, actor=caller.actor)
        return await _read(caller, conn, names, map_index, new.name)


async def _read(
    caller: ApiCaller, conn: AsyncConnection, names: tuple[str, str, str], map_index: int, name: str | None
) -> dict[str, Any]:
    row = await find_instance(caller, conn, names, map_index)
    key = TaskKey(row.run_id, row.idx, row.map_index)
    value, is_there = await tasks.result(conn, key), await tasks.has_result(conn, key)
    named: Any = {}
    if isinstance(value, dict) and value.get(RESULT_TAG) == "outputs":
        named, value = value["named"], value["value"]
        is_there = value is not None
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
        "logical_date": row.fire_at,
        "run_after": row.due_at,
        "map_index": row.map_index,
        "task_id": row.task,
        "task_display_name": row.task,
        "dag_id": row.dag,
        "dag_display_name": row.dag,
        "run_id": row.text_id,
    }


def _document(line: Line) -> dict[str, Any]:
    at = line.at.isoformat() if line.at else None
    return {"timestamp": at, "event": line.text, "level": line.level.lower()}
