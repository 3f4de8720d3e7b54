"""`POST /mcp`: the Model Context Protocol over HTTP (streamable, without a session), with the rights of the token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Query, Request, Response
from fastapi.responses import JSONResponse

from evertick.api.auth import GuardedRouter
from evertick.api.context import ApiCaller, Who
from evertick.domain.access import Permission
from evertick.domain.errors import Forbidden
from evertick.operations.mcp.protocol import Session, answer, offered
from evertick.operations.routes import route_of

router = GuardedRouter(tags=["mcp"])


@router.post("/mcp", Permission.OWN)
async def serve_mcp(
    request: Request, caller: Who, allow_trigger: Annotated[bool, Query(description="Also offer trigger_run.")] = False
) -> Response:
    """Answer one message of an MCP client. Needs a token, not a browser's session."""
    if caller.csrf is not None:
        raise Forbidden(
            "MCP needs a token: send Authorization: Bearer TOKEN. Create one with `evertick tokens create`."
        )
    caller.client = "mcp"
    tools = offered(lambda tool: caller.principal.may(tool.permission), allows_writes=allow_trigger)
    found = await answer(Session(ask=ask_as(caller), tools=tools), await request.body())
    return Response(status_code=202) if found is None else JSONResponse(found)


def ask_as(caller: ApiCaller) -> Callable[..., Awaitable[Any]]:
    """Calls operations with the permission that their routes need."""

    async def ask(operation: Callable[..., Awaitable[Any]], /, **params: Any) -> Any:
        caller.require(route_of(operation, params).permission)
        return await operation(caller, **params)

    return ask
