"""From the outermost layer straight to a plain read whose address holds nothing but words: lists, which is what is polled.

The layers between take a sixth of its time and do nothing for it. Whatever goes wrong, the long way tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastapi import APIRouter, FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from evertick.api.guard import ERROR, GuardedRoute, admit


class ShortWay:
    """`parts`: for each prefix the application there, and its routers."""

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
