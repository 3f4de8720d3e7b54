"""Assets: what updates them, what waits for them; and updates that come from outside."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import Page
from evertick.db.notify import Channel
from evertick.db.queries import assets
from evertick.db.queries.assets import Asset, AssetEvent
from evertick.domain.access import Permission
from evertick.engine.waits import find_asset, update_asset

router = APIRouter(route_class=GuardedRoute, tags=["assets"])

Name = Annotated[str, Path(max_length=1000, description="The asset's name, as DAGs write it.")]


class Update(BaseModel):
    """`extra`: what is said about it; it stays on record with the update."""

    model_config = ConfigDict(extra="forbid")
    extra: dict[str, Any] = {}


@router.get("/assets")
@requires(Permission.READ_GATES)
async def list_assets(caller: Who) -> Page[Asset]:
    """Each that a DAG updates or waits for, by name."""
    async with caller.reading() as conn:
        return Page(items=await assets.list_whole(conn), next_cursor=None)


@router.post("/assets/{name}/updates", status_code=201)
@requires(Permission.SEND_EVENTS)
async def tell(name: Name, caller: Who, wanted: Update | None = None) -> AssetEvent:
    """It was updated, by something outside. DAGs that run after it start as after a task's update."""
    async with caller.changing(Channel.PLAN) as conn:
        await find_asset(conn, name)
        return await update_asset(conn, asset=name, extra=wanted.extra if wanted else {}, actor=caller.actor)
