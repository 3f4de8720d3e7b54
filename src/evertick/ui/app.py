"""The complete ASGI application: the APIs of evertick.api and the pages of the web UI."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ExceptionHandler

from evertick.api.app import make_app as make_api
from evertick.api.context import ApiContext
from evertick.ui.layout import HEADERS, Frame, refusal
from evertick.ui.pages import (
    admin,
    backfills,
    dag,
    dag_schedules,
    dags,
    gates,
    home,
    login,
    runners,
    runs,
    static,
    task,
    trigger,
    waits,
)

# Each module has a `router`. Routes match in this order.
DAG_PAGES = (dags, dag, dag_schedules, trigger)
RUN_PAGES = (runs, task, waits, backfills)
OTHER_PAGES = (gates, runners, admin)
PAGES = (static, login, home, *DAG_PAGES, *RUN_PAGES, *OTHER_PAGES)


def make_app(desk: ApiContext) -> FastAPI:
    app = make_api(desk)
    app.state.frame = Frame()
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
