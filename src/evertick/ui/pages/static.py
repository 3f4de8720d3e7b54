"""`/static`: stylesheets and scripts. The hash in the address makes them the browser's for ever."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.ui.frame import FOREVER, Frame, PageRoute

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/static/{version}/{name:path}")
@needs(Permission.OPEN)
async def static_file(
    version: str, name: Annotated[str, Path(max_length=200)], request: Request, caller: Who
) -> Response:
    """A page of the release before may still ask for its own: it gets today's, but does not keep it."""
    frame: Frame = request.app.state.frame
    asset = frame.assets.files.get(name)
    if asset is None:
        raise NotFound(f"There is no file {name[:200]!r} here.")
    keep = FOREVER if version == frame.assets.hash else "no-store"
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": keep})


@router.get("/favicon.ico")
@needs(Permission.OPEN)
async def favicon(request: Request, caller: Who) -> Response:
    frame: Frame = request.app.state.frame
    asset = frame.assets.files["icon.svg"]
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": "public, max-age=86400"})
