"""Data assets: the tasks that update each, the DAGs that depend on it, and a button to report an external update."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.paging import like
from evertick.domain.access import Permission
from evertick.engine.update_asset import find_asset, update_asset
from evertick.store import assets
from evertick.store.wake import Channel
from evertick.ui.frame import PageRoute, done, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Name = Annotated[str, Path(max_length=1000)]
Text = Annotated[str, Query(max_length=1000)]
_SHOWN = 200


@router.get("/assets")
@needs(Permission.READ_GATES)
async def list_assets(request: Request, caller: Who, q: Text = "", after: Text = "") -> Response:
    sought = q.strip().replace("\x00", "")
    async with caller.reading() as conn:
        found = await assets.page(
            conn, like=like(sought) if sought else None, after=after.replace("\x00", ""), limit=_SHOWN
        )
    next_name = found[-1].name if len(found) == _SHOWN else None
    return page(request, "assets.html", here="assets", rows=found, q=q, next_name=next_name)


@router.post("/assets/{name:path}/update")
@needs(Permission.SEND_EVENTS)
async def tell(name: Name, caller: Who) -> Response:
    """Report an external update of the asset."""
    async with caller.changing(Channel.PLAN) as conn:
        await find_asset(conn, name)
        await update_asset(conn, asset=name, extra={}, actor=caller.actor)
    return done(f"Asset {name} updated. DAGs that depend on it are notified.")
