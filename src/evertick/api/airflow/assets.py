"""Assets with their producers and consumers, and asset events, in Airflow's format.

Evertick identifies assets by name; the API's numeric id is derived from it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import RUN_STATES
from evertick.api.airflow.run_actions import MaterializeBody, trigger_run
from evertick.api.airflow.runs import R, find_run
from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.db.notify import Channel
from evertick.db.queries import assets
from evertick.db.queries.assets import Asset, AssetTrigger, Follower, ListedUpdate, UpdateFilter
from evertick.db.queries.run_lists import ListedRun
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, UserError
from evertick.engine.waits import discard_asset_events, update_asset
from evertick.operations.caller import known_dags

router = GuardedRouter(tags=["Asset"])
# Included before `router`: its paths would match an asset's id.
asset_events_router = GuardedRouter(tags=["Asset"])


AssetId = Annotated[int, Path(ge=0, le=2**63 - 1)]


_KEYS = {name: name for name in ("id", "name", "uri", "created_at", "updated_at")}


class AssetQuery(query.Paged):
    name_pattern: query.Pattern = None
    name_prefix_pattern: query.Pattern = None
    uri_pattern: query.Pattern = None
    uri_prefix_pattern: query.Pattern = None
    dag_ids: list[str] | None = None
    only_active: bool = True


@router.get("/assets", Permission.READ_GATES, models.AssetCollectionResponse)
async def get_assets(caller: Who, asked: Annotated[AssetQuery, Query()]) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await assets.list_whole(conn)
    found = [
        each
        for each in map(_document, rows)
        if query.fits(each["name"], asked.name_pattern, asked.name_prefix_pattern)
        and query.fits(each["uri"], asked.uri_pattern, asked.uri_prefix_pattern)
        and (not asked.dag_ids or not _dags(each).isdisjoint(asked.dag_ids))
    ]
    part = query.ordered(found, asked.order_by, _KEYS)[asked.offset : asked.offset + query.page_size(asked.limit)]
    return {"assets": part, "total_entries": len(found)}


@router.get("/assets/aliases", Permission.READ_GATES, models.AssetAliasCollectionResponse)
async def get_asset_aliases(caller: Who, asked: Annotated[query.Paged, Query()]) -> dict[str, Any]:
    """Evertick has no asset aliases: the list is empty."""
    return {"asset_aliases": [], "total_entries": 0}


@router.get("/assets/{asset_id}", Permission.READ_GATES, models.AssetResponse)
async def get_asset(asset_id: AssetId, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return await find_asset(conn, asset_id)


@router.post("/assets/{asset_id}/materialize", Permission.TRIGGER_RUNS, models.DAGRunResponse)
async def materialize_asset(asset_id: AssetId, caller: Who, body: MaterializeBody | None = None) -> dict[str, Any]:
    """Trigger the DAG that updates the asset, if it is the only one."""
    wish = body or MaterializeBody()
    for name in ("logical_date", "data_interval_start", "data_interval_end", "run_after"):
        if getattr(wish, name) is not None:
            raise UserError(f"{name} must be null: the run starts immediately.")
    async with caller.write(Channel.TASKS) as conn:
        asset = await find_asset(conn, asset_id)
        makers = {task["dag_id"] for task in asset["producing_tasks"]}
        if len(makers) != 1:
            raise Conflict(f"{len(makers)} DAGs update asset {asset['name']!r}. Trigger one of them directly.")
        row = await caller.dag(conn, makers.pop())
        exists = f"A DAGRun of '{row.name}' with ID '{wish.dag_run_id}' already exists"
        return await trigger_run(caller, conn, row, wish, exists=exists)


def number_of(name: str) -> int:
    return zlib.crc32(name.encode())


async def find_asset(conn: AsyncConnection, asset_id: int) -> dict[str, Any]:
    documents = (_document(each) for each in await assets.list_whole(conn))
    return query.first_of((each for each in documents if each["id"] == asset_id), _missing(asset_id))


def _missing(asset_id: int) -> str:
    return f"The Asset with ID: `{asset_id}` was not found"


def _document(row: Asset) -> dict[str, Any]:
    makers, takers = row.producers, row.consumers
    return {
        "id": number_of(row.name),
        "name": row.name,
        "uri": row.uri,
        "group": row.group,
        "extra": row.extra,
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


@query.with_ranges("timestamp")
class AssetEventQuery(query.Paged):
    asset_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    source_dag_id: str | None = None
    source_task_id: str | None = None
    source_run_id: str | None = None
    source_map_index: query.Small | None = None
    name_pattern: query.Pattern = None
    name_prefix_pattern: query.Pattern = None
    partition_key: Annotated[str, Field(max_length=250)] | None = None


class AccessControl(query.Body):
    """Evertick has no teams: an update reaches all DAGs that depend on the asset."""

    allow_global: bool = True
    consumer_teams: list[str] | None = None


class NewEvent(query.Body):
    asset_id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    extra: dict[str, Any] = Field(default_factory=dict)
    partition_key: Annotated[str, Field(min_length=1, max_length=250)] | None = None
    access_control: AccessControl | None = None


@asset_events_router.get("/assets/events", Permission.READ_RUNS, models.AssetEventCollectionResponse)
async def get_asset_events(caller: Who, asked: Annotated[AssetEventQuery, Query()]) -> dict[str, Any]:
    """List recorded updates by tasks, with the runs that they triggered."""
    order = query.columns(asked.order_by, EVENT_ORDER)
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        wanted = UpdateFilter(
            dag_ids=visible,
            assets=None if asked.asset_id is None else [await _name_of(conn, asked.asset_id)],
            dag=asked.source_dag_id,
            task=asked.source_task_id,
            text_id=asked.source_run_id,
            map_index=asked.source_map_index,
            partition=asked.partition_key,
            **query.patterns(asked, _="name"),
            occurred=query.span(asked, "timestamp"),
        )
        found, total = await assets.list_updates(conn, wanted, query.paged(asked, order))
        after = await assets.followers_of(conn, found, visible) if found else {}
    documents = [_update(each, after.get(each.source, [])) for each in found]
    return {"asset_events": documents, "total_entries": total}


@asset_events_router.post("/assets/events", Permission.SEND_EVENTS, models.AssetEventResponse)
async def create_asset_event(body: NewEvent, caller: Who) -> dict[str, Any]:
    """Report an external update. DAGs that depend on the asset start as after an update by a task."""
    if body.access_control is not None and (body.access_control.consumer_teams or not body.access_control.allow_global):
        raise UserError("access_control must be omitted: Evertick has no teams.")
    extra = {**body.extra, "from_rest_api": True}
    async with caller.write(Channel.SCHEDULE) as conn:
        name = await _name_of(conn, body.asset_id)
        told = await update_asset(conn, asset=name, extra=extra, actor=caller.actor, partition=body.partition_key)
    made = ListedUpdate(name, told.update_id, None, None, None, None, -1, told.occurred_at, extra, body.partition_key)
    return _update(made, [])


@asset_events_router.get("/assets/{asset_id}/queuedEvents", Permission.READ_GATES, models.QueuedEventCollectionResponse)
async def get_asset_queued_events(asset_id: AssetId, caller: Who, before: Before = None) -> dict[str, Any]:
    """List updates queued for DAGs that still wait for other assets."""
    return await _queued(caller, before, asset_id=asset_id)


@asset_events_router.get(
    "/dags/{dag_id}/assets/queuedEvents", Permission.READ_SCHEDULES, models.QueuedEventCollectionResponse
)
async def get_dag_asset_queued_events(dag_id: str, caller: Who, before: Before = None) -> dict[str, Any]:
    return await _queued(caller, before, dag=dag_id)


@asset_events_router.get(
    "/dags/{dag_id}/assets/{asset_id}/queuedEvents", Permission.READ_SCHEDULES, models.QueuedEventResponse
)
async def get_dag_asset_queued_event(
    dag_id: str, asset_id: AssetId, caller: Who, before: Before = None
) -> dict[str, Any]:
    events: list[dict[str, Any]] = (await _queued(caller, before, dag=dag_id, asset_id=asset_id))["queued_events"]
    return query.first_of(events, f"Queued event with dag_id: `{dag_id}` and asset_id: `{asset_id}` was not found")


@asset_events_router.delete("/assets/{asset_id}/queuedEvents", Permission.EDIT_SCHEDULES, status_code=204)
async def delete_asset_queued_events(asset_id: AssetId, caller: Who, before: Before = None) -> None:
    """Discard the queued updates of the asset."""
    await _discard(caller, before, asset_id=asset_id)


@asset_events_router.delete("/dags/{dag_id}/assets/queuedEvents", Permission.EDIT_SCHEDULES, status_code=204)
async def delete_dag_asset_queued_events(dag_id: str, caller: Who, before: Before = None) -> None:
    await _discard(caller, before, dag=dag_id)


@asset_events_router.delete("/dags/{dag_id}/assets/{asset_id}/queuedEvents", Permission.EDIT_SCHEDULES, status_code=204)
async def delete_dag_asset_queued_event(dag_id: str, asset_id: AssetId, caller: Who, before: Before = None) -> None:
    await _discard(caller, before, dag=dag_id, asset_id=asset_id)


@asset_events_router.get(f"{R}/upstreamAssetEvents", Permission.READ_RUNS, models.AssetEventCollectionResponse)
async def get_upstream_asset_events(dag_id: str, dag_run_id: str, caller: Who) -> dict[str, Any]:
    """List the updates that triggered a run."""
    async with caller.read() as conn:
        run = await find_run(caller, conn, dag_id, dag_run_id)
        found = await assets.causes(conn, run.run_id)
        known = await known_dags(caller, conn, {each.source_dag for each in found if each.source_dag is not None})
    told = [each if each.source_dag in known else replace(each, source_dag=None, source_text_id=None) for each in found]
    return {"asset_events": [_event(each, run) for each in told], "total_entries": len(told)}


async def _name_of(conn: AsyncConnection, asset_id: int) -> str:
    names = [row.name for row in await assets.list_assets(conn)]
    return query.first_of((name for name in names if number_of(name) == asset_id), _missing(asset_id))


async def _discard(
    caller: ApiCaller, before: datetime | None, *, dag: str | None = None, asset_id: int | None = None
) -> None:
    async with caller.write() as conn:
        dag_ids = await caller.visible_dag_ids(conn) if dag is None else [(await caller.dag(conn, dag)).dag_id]
        asset = None if asset_id is None else await _name_of(conn, asset_id)
        await discard_asset_events(conn, dag_ids=dag_ids, asset=asset, before=_aware(before), actor=caller.actor)


async def _queued(
    caller: ApiCaller, before: datetime | None, *, dag: str | None = None, asset_id: int | None = None
) -> dict[str, Any]:
    latest = _aware(before)
    async with caller.read() as conn:
        if dag is not None:
            await caller.dag(conn, dag)
        asset = None if asset_id is None else (await find_asset(conn, asset_id))["name"]
        consumers = await assets.consumers(conn)
    found = [
        {
            "asset_id": number_of(each.asset),
            "dag_id": each.dag,
            "dag_display_name": each.dag,
            "created_at": each.updated_at,
        }
        for each in consumers
        if each.updated_at is not None
        and dag in (None, each.dag)
        and asset in (None, each.asset)
        and (latest is None or each.updated_at < latest)
    ]
    return {"queued_events": found, "total_entries": len(found)}


def _event(each: AssetTrigger, run: ListedRun) -> dict[str, Any]:
    number = _event_id(each.asset, each.source_run_id, each.update_id)
    source = {"source_dag_id": each.source_dag, "source_run_id": each.source_text_id, "source_map_index": -1}
    return {**_recorded(each, number), **source, "created_dagruns": [_made(run, run.started_at or run.created_at)]}


def _update(each: ListedUpdate, after: list[Follower]) -> dict[str, Any]:
    return {
        **_recorded(each, _event_id(*each.source)),
        "source_dag_id": each.dag,
        "source_task_id": each.task,
        "source_run_id": each.text_id,
        "source_map_index": each.map_index,
        "created_dagruns": [_made(run, run.started_at) for run in after],
    }


def _recorded(each: AssetTrigger | ListedUpdate, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "asset_id": number_of(each.asset),
        "name": each.asset,
        "uri": each.asset,
        "group": "asset",
        "timestamp": each.occurred_at,
        "extra": each.extra,
        "partition_key": each.partition_key,
    }


def _made(run: ListedRun | Follower, started_at: datetime | None) -> dict[str, Any]:
    """A run that the update triggered."""
    return {
        "dag_id": run.dag,
        "run_id": run.text_id,
        "logical_date": run.fire_at,
        "start_date": started_at,
        "end_date": run.finished_at,
        "state": RUN_STATES[run.state],
        "triggering": True,
    }


def _event_id(asset: str, run_id: int | None, update_id: int | None) -> int:
    return number_of(f"{asset} {run_id}" if update_id is None else f"{asset} told {update_id}")


def _aware(instant: datetime | None) -> datetime | None:
    return instant.replace(tzinfo=UTC) if instant is not None and instant.tzinfo is None else instant
