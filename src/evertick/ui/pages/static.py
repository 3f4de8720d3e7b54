"""`/static`: stylesheets and scripts. The URL contains a hash, so browsers cache them without expiry."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.auth import requires
from evertick.api.context import Who
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.ui.layout import FOREVER, Frame, PageRoute

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/static/{version}/{name:path}")
@requires(Permission.OPEN)
async def static_file(
    version: str, name: Annotated[str, Path(max_length=200)], request: Request, caller: Who
) -> Response:
    """Serve a file. A page of an older release may request its old hash: it gets the current file, uncached."""
    frame: Frame = request.app.state.frame
    asset = frame.assets.files.get(name)
    if asset is None:
        raise NotFound(f"Unknown static file {name[:200]!r}.")
    keep = FOREVER if version == frame.assets.hash else "no-store"
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": keep})


@router.get("/favicon.ico")
@requires(Permission.OPEN)
async def favicon(request: Request, caller: Who) -> Response:
    frame: Frame = request.app.state.frame
    asset = frame.assets.files["icon.svg"]
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": "public, max-age=86400"})
