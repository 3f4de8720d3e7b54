"""Asset events: updates of assets, updates queued for a DAG, and updates that triggered a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.asking import Body, Paged, Pattern, Small, begins, columns, contains, paged, span
from evertick.api.airflow.assets import AssetId, find_asset, number_of
from evertick.api.airflow.models import (
    AssetEventCollectionResponse,
    AssetEventResponse,
    QueuedEventCollectionResponse,
    QueuedEventResponse,
)
from evertick.api.airflow.runs import R, find_run
from evertick.api.airflow.words import RUN_STATES, run_document
from evertick.api.desk import Who
from evertick.api.discretion import known_dags
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, UserError
from evertick.engine.unhear import unhear
from evertick.engine.update_asset import update_asset
from evertick.store import assets
from evertick.store.assets import Cause, Follower, ListedUpdate, UpdateFilter
from evertick.store.run_lists import ListedRun
from evertick.store.wake import Channel

router = APIRouter(route_class=GuardedRoute, tags=["Asset"])

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


@router.get("/assets/events", response_model=AssetEventCollectionResponse)
@needs(Permission.READ_RUNS)
async def get_asset_events(caller: Who, asked: Annotated[EventQuery, Query()]) -> dict[str, Any]:
    """List recorded updates by tasks, with the runs that they triggered."""
    order = columns(asked.order_by, EVENT_ORDER)
    async with caller.reading() as conn:
        visible = await caller.visible(conn)
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


@router.post("/assets/events", response_model=AssetEventResponse)
@needs(Permission.SEND_EVENTS)
async def create_asset_event(body: NewEvent, caller: Who) -> dict[str, Any]:
    """Report an external update. DAGs that depend on the asset start as after an update by a task."""
    if body.partition_key is not None:
        raise UserError("partition_key must be null: Evertick has no partitions.")
    if body.access_control is not None and (body.access_control.consumer_teams or not body.access_control.allow_global):
        raise UserError("access_control must be omitted: Evertick has no teams.")
    extra = {**body.extra, "from_rest_api": True}
    async with caller.changing(Channel.PLAN) as conn:
        name = await _name_of(conn, body.asset_id)
        told = await update_asset(conn, asset=name, extra=extra, actor=caller.actor)
    made = ListedUpdate(name, told.update_id, None, None, None, None, -1, told.occurred_at, extra)
    return _update(made, [])


@router.get("/assets/{asset_id}/queuedEvents", response_model=QueuedEventCollectionResponse)
@needs(Permission.READ_GATES)
async def get_asset_queued_events(asset_id: AssetId, caller: Who, before: Before = None) -> dict[str, Any]:
    """List updates queued for DAGs that still wait for other assets."""
    async with caller.reading() as conn:
        asset = await find_asset(conn, asset_id)
        return await _queued(conn, asset=asset["name"], before=before)


@router.get("/dags/{dag_id}/assets/queuedEvents", response_model=QueuedEventCollectionResponse)
@needs(Permission.READ_SCHEDULES)
async def get_dag_asset_queued_events(dag_id: str, caller: Who, before: Before = None) -> dict[str, Any]:
    async with caller.reading() as conn:
        await caller.dag(conn, dag_id)
        return await _queued(conn, dag=dag_id, before=before)


@router.get("/dags/{dag_id}/assets/{asset_id}/queuedEvents", response_model=QueuedEventResponse)
@needs(Permission.READ_SCHEDULES)
async def get_dag_asset_queued_event(
    dag_id: str, asset_id: AssetId, caller: Who, before: Before = None
) -> dict[str, Any]:
    async with caller.reading() as conn:
        await caller.dag(conn, dag_id)
        asset = await find_asset(conn, asset_id)
        found = await _queued(conn, dag=dag_id, asset=asset["name"], before=before)
    if not found["queued_events"]:
        raise NotFound(f"Queued event with dag_id: `{dag_id}` and asset_id: `{asset_id}` was not found")
    event: dict[str, Any] = found["queued_events"][0]
    return event


@router.delete("/assets/{asset_id}/queuedEvents", status_code=204)
@needs(Permission.EDIT_SCHEDULES)
async def delete_asset_queued_events(asset_id: AssetId, caller: Who, before: Before = None) -> None:
    """Discard the queued updates of the asset."""
    async with caller.changing() as conn:
        dag_ids, name = await caller.visible(conn), await _name_of(conn, asset_id)
        await unhear(conn, dag_ids=dag_ids, asset=name, before=_aware(before), actor=caller.actor)


@router.delete("/dags/{dag_id}/assets/queuedEvents", status_code=204)
@needs(Permission.EDIT_SCHEDULES)
async def delete_dag_asset_queued_events(dag_id: str, caller: Who, before: Before = None) -> None:
    async with caller.changing() as conn:
        row = await caller.dag(conn, dag_id)
        await unhear(conn, dag_ids=[row.dag_id], asset=None, before=_aware(before), actor=caller.actor)


@router.delete("/dags/{dag_id}/assets/{asset_id}/queuedEvents", status_code=204)
@needs(Permission.EDIT_SCHEDULES)
async def delete_dag_asset_queued_event(dag_id: str, asset_id: AssetId, caller: Who, before: Before = None) -> None:
    async with caller.changing() as conn:
        row, name = await caller.dag(conn, dag_id), await _name_of(conn, asset_id)
        await unhear(conn, dag_ids=[row.dag_id], asset=name, before=_aware(before), actor=caller.actor)


@router.get(f"{R}/upstreamAssetEvents", response_model=AssetEventCollectionResponse)
@needs(Permission.READ_RUNS)
async def get_upstream_asset_events(dag_id: str, dag_run_id: str, caller: Who) -> dict[str, Any]:
    """List the updates that triggered a run."""
    async with caller.reading() as conn:
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


def _event(each: Cause, run: ListedRun) -> dict[str, Any]:
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
