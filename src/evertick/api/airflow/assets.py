"""Assets with their producers and consumers, and asset events, in Airflow's format.

Evertick identifies assets by name; the API's numeric id is derived from it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.labels import RUN_STATES, run_document
from evertick.api.airflow.models import (
    AssetAliasCollectionResponse,
    AssetCollectionResponse,
    AssetEventCollectionResponse,
    AssetEventResponse,
    AssetResponse,
    DAGRunResponse,
    QueuedEventCollectionResponse,
    QueuedEventResponse,
)
from evertick.api.airflow.query import (
    Body,
    Paged,
    Pattern,
    Small,
    begins,
    columns,
    contains,
    fits,
    ordered,
    page_size,
    paged,
    span,
)
from evertick.api.airflow.run_actions import Note
from evertick.api.airflow.runs import R, find_run
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.db.queries import assets, listings
from evertick.db.queries.assets import Asset, Follower, ListedUpdate, RunTrigger, UpdateFilter
from evertick.db.queries.run_lists import ListedRun
from evertick.db.queries.runs import Particulars
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine.runs import trigger
from evertick.engine.waits import discard_asset_events, update_asset
from evertick.operations.caller import known_dags

router = APIRouter(route_class=GuardedRoute, tags=["Asset"])
# Included before `router`: its paths would match an asset's id.
asset_events_router = APIRouter(route_class=GuardedRoute, tags=["Asset"])


AssetId = Annotated[int, Path(ge=0, le=2**63 - 1)]


_KEYS = {
    "id": lambda item: item["id"],
    "name": lambda item: item["name"],
    "uri": lambda item: item["uri"],
    "created_at": lambda item: item["created_at"],
    "updated_at": lambda item: item["updated_at"],
}


class AssetQuery(Paged):
    name_pattern: Pattern = None
    name_prefix_pattern: Pattern = None
    uri_pattern: Pattern = None
    uri_prefix_pattern: Pattern = None
    dag_ids: list[str] | None = None
    only_active: bool = True


class MaterializeBody(Body):
    dag_run_id: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    logical_date: datetime | None = None
    data_interval_start: datetime | None = None
    data_interval_end: datetime | None = None
    run_after: datetime | None = None
    conf: dict[str, Any] | None = None
    note: Note = None
    partition_key: str | None = None


@router.get("/assets", response_model=AssetCollectionResponse)
@requires(Permission.READ_GATES)
async def get_assets(caller: Who, asked: Annotated[AssetQuery, Query()]) -> dict[str, Any]:
    async with caller.read() as conn:
        documents = await _documents(conn)
    found = [
        each
        for each in documents
        if fits(each["name"], asked.name_pattern, asked.name_prefix_pattern)
        and fits(each["uri"], asked.uri_pattern, asked.uri_prefix_pattern)
        and (not asked.dag_ids or not _dags(each).isdisjoint(asked.dag_ids))
    ]
    found = ordered(found, asked.order_by, _KEYS)
    part = found[asked.offset : asked.offset + page_size(asked.limit)]
    return {"assets": part, "total_entries": len(found)}


@router.get("/assets/aliases", response_model=AssetAliasCollectionResponse)
@requires(Permission.READ_GATES)
async def get_asset_aliases(caller: Who, asked: Annotated[Paged, Query()]) -> dict[str, Any]:
    """Evertick has no asset aliases: the list is empty."""
    return {"asset_aliases": [], "total_entries": 0}


@router.get("/assets/{asset_id}", response_model=AssetResponse)
@requires(Permission.READ_GATES)
async def get_asset(asset_id: AssetId, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return await find_asset(conn, asset_id)


@router.post("/assets/{asset_id}/materialize", response_model=DAGRunResponse)
@requires(Permission.TRIGGER_RUNS)
async def materialize_asset(asset_id: AssetId, caller: Who, body: MaterializeBody | None = None) -> dict[str, Any]:
    """Trigger the DAG that updates the asset, if it is the only one."""
    wish = body or MaterializeBody()
    for name in ("logical_date", "data_interval_start", "data_interval_end", "run_after", "partition_key"):
        if getattr(wish, name) is not None:
            raise UserError(f"{name} must be null: the run starts immediately.")
    async with caller.write(Channel.TASKS) as conn:
        asset = await find_asset(conn, asset_id)
        makers = {task["dag_id"] for task in asset["producing_tasks"]}
        if len(makers) != 1:
            raise Conflict(f"{len(makers)} DAGs update asset {asset['name']!r}. Trigger one of them directly.")
        row = await caller.dag(conn, makers.pop())
        about = Particulars(key=wish.dag_run_id, note=wish.note or None)
        made = await trigger(conn, dag=row.name, params=wish.conf or {}, actor=caller.actor, about=about)
        if made.defers:
            caller.also.add(Channel.SCHEDULE)
        if not made.is_new:
            raise Conflict(f"A DAGRun of '{row.name}' with ID '{wish.dag_run_id}' already exists")
        run = await listings.run_by_number(conn, dag_id=row.dag_id, run_id=made.run_id)
    if run is None:
        raise NotFound("The run was deleted immediately after it was created.")
    return run_document(run)


def number_of(name: str) -> int:
    return zlib.crc32(name.encode())


async def find_asset(conn: AsyncConnection, asset_id: int) -> dict[str, Any]:
    for each in await _documents(conn):
        if each["id"] == asset_id:
            return each
    raise NotFound(f"The Asset with ID: `{asset_id}` was not found")


async def _documents(conn: AsyncConnection) -> list[dict[str, Any]]:
    return [_document(each) for each in await assets.list_whole(conn)]


def _document(row: Asset) -> dict[str, Any]:
    makers, takers = row.producers, row.consumers
    return {
        "id": number_of(row.name),
        "name": row.name,
        "uri": row.name,
        "group": "asset",
        "created_at": row.since,
        "updated_at": max([row.since, *(e.since for e in makers), *(e.since for e in takers)]),
        "producing_tasks": [
            {"dag_id": e.dag, "task_id": e.task, "created_at": e.since, "updated_at": e.since} for e in makers
        ],
        "scheduled_dags": [{"dag_id": e.dag, "created_at": e.since, "updated_at": e.since} for e in takers],
        "consuming_tasks": [],
        "aliases": [],
        "watchers": [],
    }


def _dags(document: dict[str, Any]) -> set[str]:
    return {each["dag_id"] for each in (*document["producing_tasks"], *document["scheduled_dags"])}


Before = Annotated[datetime | None, Query()]


EVENT_ORDER = {
    "source_task_id": ["task"],
    "source_dag_id": ["dag"],
    "source_run_id": ["text_id"],
    "source_map_index": ["map_index"],
    "timestamp": ["occurred_at"],
}


class EventQuery(Paged):
    asset_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    source_dag_id: str | None = None
    source_task_id: str | None = None
    source_run_id: str | None = None
    source_map_index: Small | None = None
    name_pattern: Pattern = None
    name_prefix_pattern: Pattern = None
    timestamp_gte: datetime | None = None
    timestamp_gt: datetime | None = None
    timestamp_lte: datetime | None = None
    timestamp_lt: datetime | None = None


class AccessControl(Body):
    """Evertick has no teams: an update reaches all DAGs that depend on the asset."""

    allow_global: bool = True
    consumer_teams: list[str] | None = None


class NewEvent(Body):
    asset_id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    extra: dict[str, Any] = Field(default_factory=dict)
    partition_key: str | None = None
    access_control: AccessControl | None = None


@asset_events_router.get("/assets/events", response_model=AssetEventCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_asset_events(caller: Who, asked: Annotated[EventQuery, Query()]) -> dict[str, Any]:
    """List recorded updates by tasks, with the runs that they triggered."""
    order = columns(asked.order_by, EVENT_ORDER)
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        wanted = UpdateFilter(
            dag_ids=visible,
            assets=None if asked.asset_id is None else [await _name_of(conn, asked.asset_id)],
            dag=asked.source_dag_id,
            task=asked.source_task_id,
            text_id=asked.source_run_id,
            map_index=asked.source_map_index,
            like=contains(asked.name_pattern),
            heads=begins(asked.name_prefix_pattern),
            occurred=span(asked, "timestamp"),
        )
        found, total = await assets.list_updates(conn, wanted, paged(asked, order))
        after = await assets.followers(conn, found, visible) if found else {}
    documents = [_update(each, after.get(each.source, [])) for each in found]
    return {"asset_events": documents, "total_entries": total}


@asset_events_router.post("/assets/events", response_model=AssetEventResponse)
@requires(Permission.SEND_EVENTS)
async def create_asset_event(body: NewEvent, caller: Who) -> dict[str, Any]:
    """Report an external update. DAGs that depend on the asset start as after an update by a task."""
    if body.partition_key is not None:
        raise UserError("partition_key must be null: Evertick has no partitions.")
    if body.access_control is not None and (body.access_control.consumer_teams or not body.access_control.allow_global):
        raise UserError("access_control must be omitted: Evertick has no teams.")
    extra = {**body.extra, "from_rest_api": True}
    async with caller.write(Channel.SCHEDULE) as conn:
        name = await _name_of(conn, body.asset_id)
        told = await update_asset(conn, asset=name, extra=extra, actor=caller.actor)
    made = ListedUpdate(name, told.update_id, None, None, None, None, -1, told.occurred_at, extra)
    return _update(made, [])


@asset_events_router.get("/assets/{asset_id}/queuedEvents", response_model=QueuedEventCollectionResponse)
@requires(Permission.READ_GATES)
async def get_asset_queued_events(asset_id: AssetId, caller: Who, before: Before = None) -> dict[str, Any]:
    """List updates queued for DAGs that still wait for other assets."""
    async with caller.read() as conn:
        asset = await find_asset(conn, asset_id)
        return await _queued(conn, asset=asset["name"], before=before)


@asset_events_router.get("/dags/{dag_id}/assets/queuedEvents", response_model=QueuedEventCollectionResponse)
@requires(Permission.READ_SCHEDULES)
async def get_dag_asset_queued_events(dag_id: str, caller: Who, before: Before = None) -> dict[str, Any]:
    async with caller.read() as conn:
        await caller.dag(conn, dag_id)
        return await _queued(conn, dag=dag_id, before=before)


@asset_events_router.get("/dags/{dag_id}/assets/{asset_id}/queuedEvents", response_model=QueuedEventResponse)
@requires(Permission.READ_SCHEDULES)
async def get_dag_asset_queued_event(
    dag_id: str, asset_id: AssetId, caller: Who, before: Before = None
) -> dict[str, Any]:
    async with caller.read() as conn:
        await caller.dag(conn, dag_id)
        asset = await find_asset(conn, asset_id)
        found = await _queued(conn, dag=dag_id, asset=asset["name"], before=before)
    if not found["queued_events"]:
        raise NotFound(f"Queued event with dag_id: `{dag_id}` and asset_id: `{asset_id}` was not found")
    event: dict[str, Any] = found["queued_events"][0]
    return event


@asset_events_router.delete("/assets/{asset_id}/queuedEvents", status_code=204)
@requires(Permission.EDIT_SCHEDULES)
async def delete_asset_queued_events(asset_id: AssetId, caller: Who, before: Before = None) -> None:
    """Discard the queued updates of the asset."""
    async with caller.write() as conn:
        dag_ids, name = await caller.visible_dag_ids(conn), await _name_of(conn, asset_id)
        await discard_asset_events(conn, dag_ids=dag_ids, asset=name, before=_aware(before), actor=caller.actor)


@asset_events_router.delete("/dags/{dag_id}/assets/queuedEvents", status_code=204)
@requires(Permission.EDIT_SCHEDULES)
async def delete_dag_asset_queued_events(dag_id: str, caller: Who, before: Before = None) -> None:
    async with caller.write() as conn:
        row = await caller.dag(conn, dag_id)
        await discard_asset_events(conn, dag_ids=[row.dag_id], asset=None, before=_aware(before), actor=caller.actor)


@asset_events_router.delete("/dags/{dag_id}/assets/{asset_id}/queuedEvents", status_code=204)
@requires(Permission.EDIT_SCHEDULES)
async def delete_dag_asset_queued_event(dag_id: str, asset_id: AssetId, caller: Who, before: Before = None) -> None:
    async with caller.write() as conn:
        row, name = await caller.dag(conn, dag_id), await _name_of(conn, asset_id)
        await discard_asset_events(conn, dag_ids=[row.dag_id], asset=name, before=_aware(before), actor=caller.actor)


@asset_events_router.get(f"{R}/upstreamAssetEvents", response_model=AssetEventCollectionResponse)
@requires(Permission.READ_RUNS)
async def get_upstream_asset_events(dag_id: str, dag_run_id: str, caller: Who) -> dict[str, Any]:
    """List the updates that triggered a run."""
    async with caller.read() as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        found = await assets.causes(conn, run.run_id)
        known = await known_dags(caller, conn, {each.source_dag for each in found if each.source_dag is not None})
    told = [each if each.source_dag in known else replace(each, source_dag=None, source_text_id=None) for each in found]
    return {"asset_events": [_event(each, run) for each in told], "total_entries": len(told)}


async def _name_of(conn: AsyncConnection, asset_id: int) -> str:
    for row in await assets.list_assets(conn):
        if number_of(row.name) == asset_id:
            return row.name
    raise NotFound(f"The Asset with ID: `{asset_id}` was not found")


async def _queued(
    conn: AsyncConnection, *, dag: str | None = None, asset: str | None = None, before: datetime | None
) -> dict[str, Any]:
    latest = _aware(before)
    found = [
        {
            "asset_id": number_of(each.asset),
            "dag_id": each.dag,
            "dag_display_name": each.dag,
            "created_at": each.heard_at,
        }
        for each in await assets.consumers(conn)
        if each.heard_at is not None
        and dag in (None, each.dag)
        and asset in (None, each.asset)
        and (latest is None or each.heard_at < latest)
    ]
    return {"queued_events": found, "total_entries": len(found)}


def _event(each: RunTrigger, run: ListedRun) -> dict[str, Any]:
    made = {
        "dag_id": run.dag,
        "run_id": run.text_id,
        "logical_date": run.fire_at,
        "start_date": run.started_at or run.created_at,
        "end_date": run.finished_at,
        "state": run_document(run)["state"],
        "triggering": True,
    }
    return {
        "id": _event_id(each.asset, each.source_run_id, each.update_id),
        "asset_id": number_of(each.asset),
        "name": each.asset,
        "uri": each.asset,
        "group": "asset",
        "source_dag_id": each.source_dag,
        "source_run_id": each.source_text_id,
        "source_map_index": -1,
        "created_dagruns": [made],
        "timestamp": each.occurred_at,
        "extra": each.extra,
    }


def _update(each: ListedUpdate, after: list[Follower]) -> dict[str, Any]:
    made = [
        {
            "dag_id": run.dag,
            "run_id": run.text_id,
            "logical_date": run.fire_at,
            "start_date": run.started_at,
            "end_date": run.finished_at,
            "state": RUN_STATES[run.state],
            "triggering": True,
        }
        for run in after
    ]
    return {
        "id": _event_id(*each.source),
        "asset_id": number_of(each.asset),
        "name": each.asset,
        "uri": each.asset,
        "group": "asset",
        "source_dag_id": each.dag,
        "source_task_id": each.task,
        "source_run_id": each.text_id,
        "source_map_index": each.map_index,
        "created_dagruns": made,
        "timestamp": each.occurred_at,
        "extra": each.extra,
    }


def _event_id(asset: str, run_id: int | None, update_id: int | None) -> int:
    return number_of(f"{asset} {run_id}" if update_id is None else f"{asset} told {update_id}")


def _aware(instant: datetime | None) -> datetime | None:
    return instant.replace(tzinfo=UTC) if instant is not None and instant.tzinfo is None else instant
