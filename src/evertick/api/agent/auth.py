"""Authentication of agents by attempt tokens, before the request body is read.

User tokens are not valid here, whatever their role, and attempt tokens are valid only here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import psycopg
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from psycopg import AsyncConnection

from evertick.api.auth import Handler, is_first, record_refusal
from evertick.api.context import ApiContext
from evertick.db.notify import Channel, notify
from evertick.db.queries import runners
from evertick.db.queries.runners import HeldRow
from evertick.domain.access import Actor
from evertick.domain.agent_protocol import AgentIdentity, TokenUse
from evertick.domain.attempt import session_text
from evertick.domain.errors import Conflict, EvertickError, LeaseLost, Unauthenticated

PREFIX = "/api/agent/v1"

F = TypeVar("F", bound=Callable[..., Any])


def shows(use: TokenUse) -> Callable[[F], F]:
    """Declare the kind of token that a route accepts."""

    def mark(function: F) -> F:
        function.token_use = use  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One authenticated request on behalf of one attempt."""

    context: ApiContext
    bearer: AgentIdentity
    origin: str
    request_id: str

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[LeasedConnection]:
        """Lend a connection from the agents' pool, so that agents and users do not wait for each other's connections."""
        async with self.context.agents.lent() as conn:
            yield LeasedConnection(conn)

    async def held(self, conn: AsyncConnection) -> HeldRow:
        """The current row of the attempt. Raises LeaseLost if the bearer no longer holds it."""
        bearer = self.bearer
        row = await runners.held(conn, bearer.key, epoch=bearer.epoch, session=bearer.session)
        if row is None:
            raise LeaseLost("This attempt has ended or lost its lease.")
        return row

    async def wake(self, conn: AsyncConnection, channels: set[Channel]) -> None:
        """Send wake-ups. They only shorten waits, so an error here does not fail the request."""
        with suppress(psycopg.Error):
            for channel in channels if self.context.settings.listen_notify else ():
                await notify(conn, channel)


@dataclass(frozen=True, slots=True)
class LeasedConnection:
    """An open connection with the interface of a Link."""

    conn: AsyncConnection

    async def get(self) -> AsyncConnection:
        return self.conn


class AgentRoute(APIRoute):
    """A route that must declare its token: without one, registration fails."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        use = getattr(endpoint, "token_use", None)
        if not isinstance(use, TokenUse):
            raise TypeError(f"{path} declares no token: decorate {endpoint.__name__} with @shows(...)")
        self.token_use = use
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            request.state.agent = agent = await _admit(request, self.token_use)
            try:
                return await answer(request)
            except (Conflict, LeaseLost) as refusal:
                await note_refusal(
                    request, agent.context, f"agent:{session_text(agent.bearer.session)}", agent.origin, refusal
                )
                raise

        return guarded


async def agent_of(request: Request) -> AgentRequest:
    """Authenticate the agent. Async, because FastAPI runs plain functions in a thread."""
    found: AgentRequest = request.state.agent
    return found


Who = Annotated[AgentRequest, Depends(agent_of)]


def token_of(header: str | None) -> str:
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("Missing token. Send the token as `Authorization: Bearer TOKEN`.")
    return token.strip()


async def _admit(request: Request, use: TokenUse) -> AgentRequest:
    context: ApiContext = request.app.state.context
    origin = request.client.host if request.client else "unknown"
    try:
        bearer = context.agent_tokens.read(token_of(request.headers.get("authorization")), use)
    except Unauthenticated as refusal:
        await note_refusal(request, context, "anonymous", origin, refusal)
        raise
    context.agent_presence.called.set()
    return AgentRequest(context=context, bearer=bearer, origin=origin, request_id=request.state.request_id)


async def note_refusal(
    request: Request, context: ApiContext, actor: str, origin: str, refusal: EvertickError, *, needs: str = "agent"
) -> None:
    """Record a refusal in the audit log, at most once a minute per client, so that clients cannot flood the log."""
    if not is_first(request.app.state.strangers, f"{actor} {origin}" if actor != "anonymous" else origin):
        return
    author = Actor(actor, origin, request.state.request_id)
    await record_refusal(request, context.agents.lent(), author, refusal, needs=needs)
