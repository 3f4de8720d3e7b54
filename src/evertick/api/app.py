"""The application factory: sign-in, native API (/api/v1), Airflow API (/api/v2), agent API, health and metrics.

Fast reads are answered before the framework; an error on that path repeats the request on the regular one.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import psycopg
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from evertick.api import mcp, sessions
from evertick.api.agent import files as agent_files
from evertick.api.agent import routes as agent_routes
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
    state_stores,
    system,
    task_instance_actions,
    task_instances,
    values,
)
from evertick.api.airflow.labels import tell, tell_invalid
from evertick.api.auth import ERROR, GuardedRoute, authenticate, requires
from evertick.api.context import ApiContext, Who
from evertick.api.middleware import AgentRequestLimits, Middleware
from evertick.api.native import native_routers
from evertick.api.oidc import routes as oidc_routes
from evertick.api.openapi import PREFIX, describe
from evertick.api.problems import invalid, problem, status_of
from evertick.api.runner import attempts as runner_attempts
from evertick.api.runner import files as runner_files
from evertick.api.runner import routes as runner_routes
from evertick.api.runner.auth import PREFIX as RUNNER_PREFIX
from evertick.api.runner.auth import RunnerRoute
from evertick.db.queries.shards import read_clock
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError
from evertick.observability.health import metrics_text

Handler = Callable[[Request, Exception], Awaitable[Response]]
ErrorAnswer = Callable[[Request, Exception], JSONResponse]
Parts = Mapping[str, tuple[FastAPI, Sequence[APIRouter]]]


class FastReads:
    """`parts` maps each prefix to its application and routers."""

    def __init__(self, app: ASGIApp, *, parts: Parts) -> None:
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
    state_stores.router,
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


class _Native(_Part):
    """The native API, which declares more in its document."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(super().openapi())
        return self.openapi_schema


def make_app(context: ApiContext) -> FastAPI:
    """Build the outer application; each API is a mounted application with its own OpenAPI document."""
    app = _part(context, title="Evertick", description="Sign-in, health and metrics.")
    app.include_router(sessions.router)
    app.include_router(oidc_routes.router)
    app.include_router(mcp.router)
    _add_front(app)
    about = "All functions of Evertick. See docs/howto/api.md; docs/reference/errors.md lists the errors."
    native = _part(context, title="Evertick API", description=about, kind=_Native)
    native.servers = [{"url": PREFIX}]
    airflow = _part(context, title="Airflow API", description="Compatible with the client of Airflow 3.3.", answer=tell)
    airflow.add_exception_handler(RequestValidationError, tell_invalid)
    parts: Parts = {PREFIX: (native, native_routers()), "/api/v2": (airflow, _AIRFLOW)}
    for prefix, (part, routers) in parts.items():
        for router in routers:
            part.include_router(router)
        _add_document(part)
        app.mount(prefix, part)
    _add_airflow_document(app, airflow)
    agent = _part(
        context, title="Agent API", description="For the agent that runs an attempt. See docs/howto/remote.md."
    )
    for router in (agent_routes.router, agent_routes.logs_router, agent_files.router):
        agent.include_router(router)
    agent.router.route_class = AgentRoute
    app.mount(AGENT_PREFIX, agent)
    runner = _part(context, title="Runner API", description="For runners over HTTPS. See docs/howto/other-machines.md.")
    for router in (runner_routes.router, runner_attempts.router, runner_files.router):
        runner.include_router(router)
    runner.router.route_class = RunnerRoute
    app.mount(RUNNER_PREFIX, runner)
    packed = _Packing(FastReads(app.answer, parts=parts), minimum_size=_GZIP_BYTES, compresslevel=_GZIP_LEVEL)
    app.surroundings = Middleware(packed, rate=context.settings.api_rate_limit, agents=AgentRequestLimits(context))
    return app


def _part(
    context: ApiContext, *, title: str, description: str, answer: ErrorAnswer = problem, kind: type[_Part] = _Part
) -> _Part:
    """Create an application without FastAPI's documentation pages: they would bypass authentication."""
    app = kind(
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
    app.state.context = context
    app.state.strangers = {}
    for error in (EvertickError, psycopg.Error, UnicodeEncodeError, HTTPException, OSError, Exception):
        app.add_exception_handler(error, _logged(answer))
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, _tell_disconnected)
    return app


def _logged(answer: ErrorAnswer) -> Handler:
    async def handle(request: Request, error: Exception) -> JSONResponse:
        if status_of(error)[0] >= 500:
            log_fault(request, error)
        return answer(request, error)

    return handle


async def _tell_disconnected(request: Request, error: Exception) -> Response:
    """The client disconnected while sending its body: no response is possible, and it is no server error."""
    return Response(status_code=400)


def log_fault(request: Request, error: Exception) -> None:
    context: ApiContext = request.app.state.context
    route = request.scope.get("route")
    path = getattr(route, "path", "unknown")
    context.log.error(
        "request_failed", method=request.method, path=path, request_id=request.state.request_id, error=error
    )


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


def _add_airflow_document(app: FastAPI, airflow: FastAPI) -> None:
    @cache
    def packed() -> tuple[bytes, bytes]:
        document = airflow.openapi()
        paths = {f"/api/v2{path}": each for path, each in document["paths"].items()}
        content = json.dumps({**document, "paths": paths}).encode()
        return content, gzip.compress(content)

    @app.get("/openapi.json", include_in_schema=False)
    @requires(Permission.OPEN)
    async def airflow_document(caller: Who, request: Request) -> Response:
        """The document of the Airflow API, where Airflow has it: tools read it there without a token. Packed once."""
        content, gzipped = await asyncio.to_thread(packed)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(content, media_type="application/json", headers={"Vary": "Accept-Encoding"})
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(gzipped, media_type="application/json", headers=headers)


def _add_document(app: FastAPI) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    @requires(Permission.OWN)
    async def document(caller: Who) -> JSONResponse:
        return JSONResponse(app.openapi())
