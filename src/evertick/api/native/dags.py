"""DAGs and their tasks; pausing, deleting, triggering; and files that could not be loaded."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Caller, Who, tags_of
from evertick.api.paging import (
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    Limit,
    Page,
    cursor,
    etag_of,
    like,
    put_etag,
    read_cursor,
)
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.db.queries.dags import DagFilter, DagRow, ImportErrorRow
from evertick.domain.access import Permission
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.engine import dags as verbs
from evertick.engine.runs import trigger
from evertick.engine.schedules import CatchUp

router = APIRouter(route_class=GuardedRoute, tags=["dags"])

LONGEST_NAME = 250
DagName = Annotated[str, Path(max_length=LONGEST_NAME, description="The DAG's name.")]


class Dag(BaseModel):
    name: str
    description: str | None
    is_paused: bool
    version: int | None
    file: str
    tags: list[str]
    task_count: int
    max_active_runs: int | None
    published_at: datetime | None


class DagTask(BaseModel):
    """A task of the plan. `spec` has what its author said beside the defaults."""

    name: str
    kind: str
    upstream: list[str]
    downstream: list[str]
    queue: str | None
    priority: int
    trigger_rule: str
    retries: int
    timeout_seconds: float | None
    spec: dict[str, Any]


class DagPage(Dag):
    timezone: str
    params: list[dict[str, Any]]
    tasks: list[DagTask]


class Unpause(BaseModel):
    """What becomes of the fires that the pause kept from the schedules: skip, latest or all."""

    model_config = ConfigDict(extra="forbid")
    catch_up: MisfirePolicy = MisfirePolicy.SKIP
    window_seconds: Annotated[float, Field(ge=0, le=10**9)] | None = None


class Changed(BaseModel):
    is_changed: bool


class Trigger(BaseModel):
    model_config = ConfigDict(extra="forbid")
    params: dict[str, Any] = {}


class TriggeredRun(BaseModel):
    run_id: int
    is_new: bool


@router.get("/dags")
@requires(Permission.READ_DAGS)
async def list_dags(
    caller: Who,
    contains: Annotated[str | None, Query(max_length=LONGEST_NAME, description="Text in the name.")] = None,
    tag: Annotated[str | None, Query(max_length=LONGEST_NAME)] = None,
    is_paused: bool | None = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[Dag]:
    """DAGs in the order of their names."""
    (after,) = read_cursor(cursor_text, "")
    async with caller.reading() as conn:
        wanted = DagFilter(tags=tags_of(caller.principal.tags), tag=tag, like=like(contains), paused=is_paused)
        found = await dags.page(conn, wanted, after=after, limit=limit)
    return Page(items=[_dag(row) for row in found], next_cursor=cursor(found[-1].name) if len(found) == limit else None)


@router.get("/dags/{dag}")
@requires(Permission.READ_DAGS)
async def show_dag(dag: DagName, response: Response, caller: Who) -> DagPage:
    """One DAG with its parameters and tasks."""
    async with caller.reading() as conn:
        row = await caller.dag(conn, dag)
        queues = await dags.queues(conn, row.version_id)
    spec = spec_of(row)
    page = DagPage(
        **_dag(row).model_dump(),
        timezone=spec.timezone,
        params=[plain(each) for each in _list(row, "params")],
        tasks=_tasks(row, spec, queues),
    )
    put_etag(response, etag_of(page))
    return page


@router.post("/dags/{dag}/pause")
@requires(Permission.PAUSE_DAGS)
async def pause_dag(dag: DagName, caller: Who) -> Changed:
    """Its schedules skip, on record, and what has not started waits. Running tasks go on."""
    async with caller.changing(Channel.PLAN, Channel.READY) as conn:
        await caller.dag(conn, dag)
        return Changed(is_changed=await verbs.pause(conn, dag=dag, actor=caller.actor))


@router.post("/dags/{dag}/unpause")
@requires(Permission.PAUSE_DAGS)
async def unpause_dag(dag: DagName, caller: Who, how: Unpause | None = None) -> Changed:
    asked = how or Unpause()
    catch_up = CatchUp(policy=asked.catch_up, window_seconds=asked.window_seconds)
    async with caller.changing(Channel.PLAN, Channel.READY) as conn:
        await caller.dag(conn, dag)
        return Changed(is_changed=await verbs.unpause(conn, dag=dag, actor=caller.actor, catch_up=catch_up))


@router.delete("/dags/{dag}", status_code=204)
@requires(Permission.DELETE_DAGS)
async def delete_dag(dag: DagName, caller: Who) -> None:
    """Takes it out of planning. Its history stays, and its open runs go on."""
    async with caller.changing(Channel.PLAN) as conn:
        await caller.dag(conn, dag)
        await verbs.delete(conn, dag=dag, actor=caller.actor)


@router.post("/dags/{dag}/runs", status_code=201)
@requires(Permission.TRIGGER_RUNS)
async def trigger_run(
    dag: DagName,
    wanted: Trigger,
    response: Response,
    caller: Who,
    idempotency_key: IdempotencyKey = None,
) -> TriggeredRun:
    """Start a run. The same Idempotency-Key again is the same run, told with 200 instead of 201."""
    async with caller.changing(Channel.READY) as conn:
        await caller.dag(conn, dag)
        made = await trigger(conn, dag=dag, params=wanted.params, actor=caller.actor, key=idempotency_key)
        if made.defers:
            caller.also.add(Channel.PLAN)
    response.status_code = 201 if made.is_new else 200
    return TriggeredRun(run_id=made.run_id, is_new=made.is_new)


@router.get("/import-errors")
@requires(Permission.READ_IMPORTS)
async def list_import_errors(caller: Who) -> Page[ImportErrorRow]:
    """Files that could not be loaded, with the place and the message."""
    async with caller.reading() as conn:
        return Page(items=await dags.import_errors(conn), next_cursor=None)


async def find_dag_spec(caller: Caller, conn: AsyncConnection, name: str) -> tuple[DagRow, DagSpec]:
    row = await caller.dag(conn, name)
    return row, spec_of(row)


def spec_of(row: DagRow) -> DagSpec:
    return from_json(json.dumps(row.spec))


def plain(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(row: DagRow, name: str) -> list[object]:
    found = (row.spec or {}).get(name)
    return found if isinstance(found, list) else []


def _dag(row: DagRow) -> Dag:
    description = (row.spec or {}).get("description")
    return Dag(
        name=row.name,
        description=description if isinstance(description, str) else None,
        is_paused=row.paused,
        version=row.number,
        file=row.file,
        tags=[str(tag) for tag in _list(row, "tags")],
        task_count=len(_list(row, "tasks")),
        max_active_runs=row.max_active_runs,
        published_at=row.created_at,
    )


def _tasks(row: DagRow, spec: DagSpec, queues: list[str]) -> list[DagTask]:
    raw = _list(row, "tasks")
    names = [task.name for task in spec.tasks]
    return [
        DagTask(
            name=task.name,
            kind=task.kind,
            upstream=[names[up] for up, down in spec.edges if down == place],
            downstream=[names[down] for up, down in spec.edges if up == place],
            queue=queues[place] if place < len(queues) else task.queue,
            priority=task.priority,
            trigger_rule=task.trigger_rule,
            retries=task.retry.retries,
            timeout_seconds=task.timeout_seconds,
            spec=plain(raw[place]),
        )
        for place, task in enumerate(spec.tasks)
    ]
