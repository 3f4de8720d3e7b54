"""Routes plain reads without path parameters (lists, which clients poll) directly from the outermost middleware.

The layers between take a sixth of the time of such a request and do nothing for it. Errors are left to the normal path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastapi import APIRouter, FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from evertick.api.guard import ERROR, GuardedRoute, admit


class ShortWay:
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
                request.state.caller = await admit(request, permission)
                response = await answer(request)
            except Exception as error:
                scope[ERROR] = error
            else:
                if response is not None:
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)
