"""The complete ASGI application: the APIs of evertick.api, the pages of the web UI, and its static files.

The URL of a static file contains a hash, so browsers cache it without expiry.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from evertick.api.app import make_app as make_api
from evertick.api.context import ApiContext, Who
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.ui import docs_site
from evertick.ui.layout import FOREVER, HEADERS, Frame, page_router, refusal
from evertick.ui.pages import (
    admin,
    backfills,
    capacity,
    dag,
    dag_schedules,
    dags,
    deployments,
    login,
    monitoring,
    overview,
    run_list,
    runs,
    task,
    waits,
)

# Each module has a `router`. Routes match in this order.
DAG_PAGES = (dags, dag, dag_schedules, deployments)
RUN_PAGES = (run_list, runs, task, waits, backfills)
OTHER_PAGES = (monitoring, capacity, admin)
PAGES = (login, overview, *DAG_PAGES, *RUN_PAGES, *OTHER_PAGES)

static_files = page_router()


def make_app(context: ApiContext) -> FastAPI:
    app = make_api(context)
    app.state.frame = Frame()
    app.include_router(static_files)
    app.include_router(docs_site.router)
    for module in PAGES:
        app.include_router(module.router)
    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _page_for_people(app.exception_handlers[kind]))
    return app


def _page_for_people(plain: ExceptionHandler) -> ExceptionHandler:
    """Render an unknown address or an internal error as a page for browsers and as a problem document for programs."""

    async def tell(request: Request, error: Exception) -> Response:
        is_browser = "text/html" in request.headers.get("accept", "")
        if not is_browser or request.url.path.startswith(("/api/", "/auth/")):
            answer: Response = await plain(request, error)  # type: ignore[arg-type, misc]
            return answer
        response = refusal(request, error)
        response.headers.update(HEADERS)
        return response

    return tell


@static_files.get("/static/{version}/{name:path}", Permission.OPEN)
async def static_file(
    version: str, name: Annotated[str, Path(max_length=200)], request: Request, caller: Who
) -> Response:
    """Serve a file. A page of an older release may request its old hash: it gets the current file, uncached."""
    frame: Frame = request.app.state.frame
    asset = frame.files.files.get(name)
    if asset is None:
        raise NotFound(f"Unknown static file {name[:200]!r}.")
    keep = FOREVER if version == frame.files.hash else "no-store"
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": keep})


@static_files.get("/favicon.ico", Permission.OPEN)
async def favicon(request: Request, caller: Who) -> Response:
    frame: Frame = request.app.state.frame
    asset = frame.files.files["icon.svg"]
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": "public, max-age=86400"})
