"""Assets with their producers and consumers. Evertick identifies assets by name; the API's numeric id is derived from it."""

from __future__ import annotations

import zlib
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.asking import (
    Body,
    Paged,
    Pattern,
    fits,
    ordered,
    page_size,
)
from evertick.api.airflow.models import (
    AssetAliasCollectionResponse,
    AssetCollectionResponse,
    AssetResponse,
    DAGRunResponse,
)
from evertick.api.airflow.run_changes import Note
from evertick.api.airflow.words import run_document
from evertick.api.desk import Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine.trigger import trigger
from evertick.store import assets, listing
from evertick.store.assets import Asset
from evertick.store.runs import Particulars
from evertick.store.wake import Channel

router = APIRouter(route_class=GuardedRoute, tags=["Asset"])

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
@needs(Permission.READ_GATES)
async def get_assets(caller: Who, asked: Annotated[AssetQuery, Query()]) -> dict[str, Any]:
    async with caller.reading() as conn:
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
@needs(Permission.READ_GATES)
async def get_asset_aliases(caller: Who, asked: Annotated[Paged, Query()]) -> dict[str, Any]:
    """Evertick has no asset aliases: the list is empty."""
    return {"asset_aliases": [], "total_entries": 0}


@router.get("/assets/{asset_id}", response_model=AssetResponse)
@needs(Permission.READ_GATES)
async def get_asset(asset_id: AssetId, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        return await find_asset(conn, asset_id)


@router.post("/assets/{asset_id}/materialize", response_model=DAGRunResponse)
@needs(Permission.TRIGGER_RUNS)
async def materialize_asset(asset_id: AssetId, caller: Who, body: MaterializeBody | None = None) -> dict[str, Any]:
    """Trigger the DAG that updates the asset, if it is the only one."""
    wish = body or MaterializeBody()
    for name in ("logical_date", "data_interval_start", "data_interval_end", "run_after", "partition_key"):
        if getattr(wish, name) is not None:
            raise UserError(f"{name} must be null: the run starts immediately.")
    async with caller.changing(Channel.READY) as conn:
        asset = await find_asset(conn, asset_id)
        makers = {task["dag_id"] for task in asset["producing_tasks"]}
        if len(makers) != 1:
            raise Conflict(f"{len(makers)} DAGs update asset {asset['name']!r}. Trigger one of them directly.")
        row = await caller.dag(conn, makers.pop())
        about = Particulars(key=wish.dag_run_id, note=wish.note or None)
        made = await trigger(conn, dag=row.name, params=wish.conf or {}, actor=caller.actor, about=about)
        if made.defers:
            caller.also.add(Channel.PLAN)
        if not made.is_new:
            raise Conflict(f"A DAGRun of '{row.name}' with ID '{wish.dag_run_id}' already exists")
        run = await listing.run_by_number(conn, dag_id=row.dag_id, run_id=made.run_id)
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
