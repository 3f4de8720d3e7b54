"""What tasks wrote and returned: logs, and XComs, of which every task that returned something has one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import Response, StreamingResponse

from evertick.api.airflow.instances import R, find_instance
from evertick.api.airflow.words import USUAL_ITEMS, Limit, Offset
from evertick.api.desk import Caller, Who
from evertick.api.guard import GuardedRoute, needs
from evertick.api.paging import cursor, read_cursor
from evertick.domain.access import Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound
from evertick.domain.log_lines import Line, lines_of
from evertick.store import logs, tasks
from evertick.store.listing import ListedRun
from evertick.store.tasks import TaskRow

router = APIRouter(route_class=GuardedRoute, tags=["Task Instance"])

T = f"{R}/taskInstances/{{task_id}}"
RETURN_VALUE = "return_value"
_CHUNKS = 200
_NDJSON = "application/x-ndjson"


@router.get(f"{T}/logs/{{try_number}}")
@needs(Permission.READ_LOGS)
async def get_log(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    try_number: int,
    caller: Who,
    full_content: bool = False,
    map_index: int = -1,
    token: str | None = None,
    accept: Annotated[str, Header()] = "application/json",
) -> Response:
    """One try's lines: as JSON with a token to go on, or all of them as they are read."""
    async with caller.reading() as conn:
        run, row = await find_instance(caller, conn, dag_id, dag_run_id, task_id, map_index)
        key = TaskKey(run.run_id, row.idx, row.map_index)
        made = await tasks.attempts(conn, key)
        if not 1 <= try_number <= len(made):
            raise NotFound(f"The Task Instance has no try {try_number}")
        epoch = made[try_number - 1].epoch
        first = read_cursor(token, -1)[0]
        found = [
            chunk for chunk in await logs.read(conn, key, after=(epoch, first), limit=_CHUNKS) if chunk.epoch == epoch
        ]
    if _NDJSON in accept:
        return StreamingResponse(_stream(caller, key, epoch), media_type=_NDJSON)
    lines = [line for chunk in found for line in lines_of(chunk.content, epoch=epoch, is_late=chunk.is_late)]
    more = cursor(found[-1].seq) if len(found) == _CHUNKS else None
    document = {"content": [_document(line) for line in lines], "continuation_token": more}
    return Response(json.dumps(document), media_type="application/json")


async def _stream(caller: Caller, key: TaskKey, epoch: int) -> AsyncIterator[str]:
    """No connection is held while the reader reads."""
    after = -1
    while True:
        async with caller.reading() as conn:
            found = [
                each for each in await logs.read(conn, key, after=(epoch, after), limit=_CHUNKS) if each.epoch == epoch
            ]
        for chunk in found:
            after = chunk.seq
            for line in lines_of(chunk.content, epoch=epoch, is_late=chunk.is_late):
                yield json.dumps(_document(line)) + "\n"
        if len(found) < _CHUNKS:
            return


@router.get(f"{T}/xcomEntries")
@needs(Permission.READ_RUNS)
async def get_xcom_entries(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    caller: Who,
    xcom_key: str | None = None,
    map_index: int = -1,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        run, row = await find_instance(caller, conn, dag_id, dag_run_id, task_id, map_index)
        value = await tasks.result(conn, TaskKey(run.run_id, row.idx, row.map_index))
    is_there = value is not None and xcom_key in (None, RETURN_VALUE)
    found = [_entry(run, row)] if is_there else []
    return {"xcom_entries": found[offset:], "total_entries": len(found)}


@router.get(f"{T}/xcomEntries/{{xcom_key}}")
@needs(Permission.READ_RUNS)
async def get_xcom_entry(
    dag_id: str,
    dag_run_id: str,
    task_id: str,
    xcom_key: str,
    caller: Who,
    map_index: int = -1,
    deserialize: bool = False,
    stringify: bool = False,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        run, row = await find_instance(caller, conn, dag_id, dag_run_id, task_id, map_index)
        value = await tasks.result(conn, TaskKey(run.run_id, row.idx, row.map_index))
    if value is None or xcom_key != RETURN_VALUE:
        raise NotFound(f"XCom entry with key: `{xcom_key}` not found")
    return {**_entry(run, row), "value": json.dumps(value) if stringify else value}


def _entry(run: ListedRun, row: TaskRow) -> dict[str, Any]:
    return {
        "key": RETURN_VALUE,
        "timestamp": row.finished_at,
        "logical_date": run.fire_at,
        "run_after": run.due_at,
        "map_index": row.map_index,
        "task_id": row.task,
        "task_display_name": row.task,
        "dag_id": run.dag,
        "dag_display_name": run.dag,
        "run_id": run.text_id,
    }


def _document(line: Line) -> dict[str, Any]:
    at = line.at.isoformat() if line.at else None
    return {"timestamp": at, "event": line.text, "level": line.level.lower()}
