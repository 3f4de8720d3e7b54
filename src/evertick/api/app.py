"""The application factory: sign-in, native API (/api/v1), Airflow API (/api/v2), agent API, health and metrics.

Fast reads are answered before the framework; an error on that path repeats the request on the regular one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version

import psycopg
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from evertick.api import sessions
from evertick.api.agent import files as agent_files
from evertick.api.agent import routes as agent_attempts
from evertick.api.agent import routes as agent_logs
from evertick.api.agent.auth import PREFIX as AGENT_PREFIX
from evertick.api.agent.auth import AgentRoute
from evertick.api.airflow import (
    approvals,
    assets,
    backfills,
    dag_versions,
    dags,
    outputs,
    pools,
    run_actions,
    runs,
    system,
    task_instance_actions,
    task_instances,
    values,
)
from evertick.api.airflow.labels import tell, tell_invalid
from evertick.api.auth import ERROR, GuardedRoute, authenticate, requires
from evertick.api.context import ApiContext, Who
from evertick.api.middleware import AgentLimits, Middleware
from evertick.api.native import native_routers
from evertick.api.problems import invalid, problem, status_of
from evertick.db.queries.shards import read_clock
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError
from evertick.observability.health import metrics_text


class FastReads:
    """`parts` maps each prefix to its application and routers."""

    def __init__(self, app: ASGIApp, *, parts: Mapping[str, tuple[FastAPI, Iterable[APIRouter]]]) -> None:
        self._app = app
        self.ways = {
            prefix + route.path: (part, route.permission, route.answer_plainly)
            for prefix, (part, routers) in parts.items()
            for router in routers
            for route in router.routes
            if isinstance(route, GuardedRoute) and route.answer_plainly is not None and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = self.ways.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "GET" else None
        if way is not None:
            part, permission, answer = way
            request = Request({**scope, "app": part, "path_params": {}}, receive, send)
            try:
                request.state.caller = await authenticate(request, permission)
                response = await answer(request)
            except Exception as error:
                scope[ERROR] = error
            else:
                if response is not None:
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)


# Outputs come before instances: the part after a task's name in their paths would match a map index.
_AIRFLOW = (
    dags.router,
    dag_versions.router,
    runs.router,
    run_actions.router,
    outputs.router,
    system.unsupported_router,
    approvals.router,
    task_instances.router,
    task_instance_actions.router,
    assets.asset_events_router,
    assets.router,
    system.event_logs_router,
    pools.router,
    backfills.router,
    values.variables_router,
    values.connections_router,
    system.monitor_router,
)


_GZIP_BYTES = 1000


# Compression blocks the event loop. For a page of 600 KB, the default level 9 takes several times as long and saves a few percent.
_GZIP_LEVEL = 4


class _Packing(GZipMiddleware):
    """Skip this layer for clients that do not accept gzip, mostly programs that poll."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not any(name == b"accept-encoding" and b"gzip" in value for name, value in scope.get("headers", ())):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _Part(FastAPI):
    """A FastAPI application whose outer middleware runs before all layers of the framework. It also handles the framework's own
    error responses, and lets fast reads bypass the layers."""

    surroundings: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.surroundings or super().__call__)(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request inside the outer middleware."""
        await super().__call__(scope, receive, send)


def make_app(desk: ApiContext) -> FastAPI:
    """Build the outer application; each API is a mounted application with its own OpenAPI document."""
    app = _part(desk, title="Evertick", description="Sign-in, health and metrics.")
    app.include_router(sessions.router)
    _add_front(app)
    native = _part(desk, title="Evertick API", description="All functions of Evertick. See docs/howto/api.md.")
    natives = native_routers()
    for router in natives:
        native.include_router(router)
    _add_document(native)
    app.mount("/api/v1", native)
    airflow = _part(desk, title="Airflow API", description="Compatible with the client of Airflow 3.3.")
    for kind in (EvertickError, psycopg.Error, UnicodeEncodeError, HTTPException, OSError, Exception):
        airflow.add_exception_handler(kind, _tell_airflow)
    airflow.add_exception_handler(RequestValidationError, tell_invalid)
    airflows = list(_AIRFLOW)
    for router in airflows:
        airflow.include_router(router)
    _add_document(airflow)
    app.mount("/api/v2", airflow)
    agent = _part(desk, title="Agent API", description="For the agent that runs an attempt. See docs/howto/remote.md.")
    for router in (agent_attempts.router, agent_logs.logs_router, agent_files.router):
        agent.include_router(router)
    agent.router.route_class = AgentRoute
    app.mount(AGENT_PREFIX, agent)
    short = FastReads(app.answer, parts={"/api/v1": (native, natives), "/api/v2": (airflow, airflows)})
    packed = _Packing(short, minimum_size=_GZIP_BYTES, compresslevel=_GZIP_LEVEL)
    app.surroundings = Middleware(packed, rate=desk.settings.api_rate_limit, agents=AgentLimits(desk))
    return app


def parts_of(app: FastAPI) -> dict[str, FastAPI]:
    """The mounted FastAPI applications by prefix."""
    mounted = {route.path: route.app for route in app.routes if isinstance(getattr(route, "app", None), FastAPI)}  # type: ignore[attr-defined]
    return {"": app, **mounted}


def _part(desk: ApiContext, *, title: str, description: str) -> _Part:
    """Create an application without FastAPI's documentation pages: they would bypass authentication."""
    app = _Part(
        title=title,
        description=description,
        version=version("evertick"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # No slash redirects: their URL would come from the Host header, and clients would send their token to it.
        redirect_slashes=False,
    )
    app.router.route_class = GuardedRoute
    app.state.desk = desk
    app.state.strangers = {}
    for kind in (EvertickError, psycopg.Error, UnicodeEncodeError, HTTPException, OSError):
        app.add_exception_handler(kind, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(ClientDisconnect, _tell_nobody)
    app.add_exception_handler(Exception, _tell_fault)
    return app


async def _tell(request: Request, error: Exception) -> JSONResponse:
    if status_of(error)[0] >= 500:
        log_fault(request, error)
    return problem(request, error)


async def _tell_nobody(request: Request, error: Exception) -> Response:
    """The client disconnected while sending its body: no response is possible, and it is no server error."""
    return Response(status_code=400)


async def _tell_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return invalid(request, error)


async def _tell_fault(request: Request, error: Exception) -> JSONResponse:
    log_fault(request, error)
    return problem(request, error)


async def _tell_airflow(request: Request, error: Exception) -> JSONResponse:
    if status_of(error)[0] >= 500:
        log_fault(request, error)
    return tell(request, error)


def log_fault(request: Request, error: Exception) -> None:
    desk: ApiContext = request.app.state.desk
    route = request.scope.get("route")
    path = getattr(route, "path", "unknown")
    desk.log.error("request_failed", method=request.method, path=path, request_id=request.state.request_id, error=error)


def _add_front(app: FastAPI) -> None:
    # Some external monitors send HEAD.
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_class=PlainTextResponse)
    @requires(Permission.OPEN)
    async def alive(caller: Who) -> str:
        """Liveness: this process responds."""
        return "alive\n"

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses={503: {"description": "The database is unreachable."}})
    @requires(Permission.OPEN)
    async def ready(caller: Who) -> dict[str, bool]:
        """Readiness: the database responds."""
        async with caller.read() as conn:
            await read_clock(conn)
        return {"ready": True}

    @app.get("/metrics", response_class=PlainTextResponse)
    @requires(Permission.READ_METRICS)
    async def metrics(caller: Who) -> PlainTextResponse:
        """Metrics of this process, for Prometheus."""
        return PlainTextResponse(metrics_text())


def _add_document(app: FastAPI) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    @requires(Permission.OWN)
    async def document(caller: Who) -> JSONResponse:
        return JSONResponse(app.openapi())
