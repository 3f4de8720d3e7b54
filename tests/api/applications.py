"""The whole application, made once per process: its framework works out hundreds of routes at the first requests, which takes
longer than most tests."""

from __future__ import annotations

from functools import cache

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp

from evertick.api.app import AgentRequestLimits
from evertick.api.context import ApiContext
from evertick.api.middleware import Middleware
from evertick.config import Settings
from evertick.ui.app import make_app


@cache
def _application() -> tuple[FastAPI, ASGIApp]:
    """The application and what its outermost middleware wraps."""
    app = make_app(ApiContext(Settings(), "", structlog.get_logger()))
    return app, app.surroundings._app  # type: ignore[attr-defined]


def parts_of(app: FastAPI) -> dict[str, FastAPI]:
    """The mounted FastAPI applications by prefix."""
    mounted = {route.path: route.app for route in app.routes if isinstance(getattr(route, "app", None), FastAPI)}  # type: ignore[attr-defined]
    return {"": app, **mounted}


def shared_app(context: ApiContext) -> FastAPI:
    """The application with the state of a new one. Only the latest caller may use it."""
    app, wrapped = _application()
    for part in parts_of(app).values():
        part.state.context, part.state.strangers = context, {}
    app.surroundings = Middleware(wrapped, rate=context.settings.api_rate_limit, agents=AgentRequestLimits(context))  # type: ignore[attr-defined]
    return app
