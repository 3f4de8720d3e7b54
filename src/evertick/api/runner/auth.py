"""Authentication of runners over HTTPS, before the request body is read: by a join token, then by a session's own token.

User and attempt tokens are not valid here, and these are valid nowhere else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import psycopg
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from evertick.api.agent.auth import LeasedConnection, note_refusal, token_of
from evertick.api.auth import Handler
from evertick.api.context import ApiContext
from evertick.api.runner.sent import PREFIX
from evertick.api.runner.sessions import JoinedSession
from evertick.db.notify import Channel, notify
from evertick.db.queries import runners
from evertick.db.queries.runner_tokens import RunnerTokenRow
from evertick.db.queries.runners import HeldRow
from evertick.domain.attempt import AttemptRef, session_text
from evertick.domain.errors import Forbidden, LeaseLost, Unauthenticated
from evertick.engine.runner_tokens import find_token
from evertick.secrets.runner_tokens import RunnerIdentity

__all__ = ["PREFIX", "Joining", "RunnerRoute", "RunnerTokenUse", "SessionCall", "Who", "shows"]

F = TypeVar("F", bound=Callable[..., Any])


class RunnerTokenUse(StrEnum):
    """JOIN begins a session, or renews its token; SESSION authenticates every other request."""

    JOIN = "join"
    SESSION = "session"


def shows(use: RunnerTokenUse) -> Callable[[F], F]:
    """Declare the kind of token that a route accepts."""

    def mark(function: F) -> F:
        function.token_use = use  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerCall:
    """One authenticated request of a runner."""

    context: ApiContext
    origin: str
    request_id: str

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[LeasedConnection]:
        """Lend a connection from the runners' pool."""
        async with self.context.runners.lent() as conn:
            yield LeasedConnection(conn)

    async def wake(self, lent: LeasedConnection, channels: set[Channel]) -> None:
        """Send wake-ups. They only shorten waits, so an error here does not fail the request."""
        with suppress(psycopg.Error):
            for channel in channels if self.context.settings.listen_notify else ():
                await notify(lent.conn, channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCall(RunnerCall):
    token: RunnerTokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCall(RunnerCall):
    who: RunnerIdentity

    @property
    def session(self) -> int:
        return self.who.session

    async def joined(self, lent: LeasedConnection) -> JoinedSession:
        return await self.context.joined.get(lent.conn, self.session)

    async def held(self, lent: LeasedConnection, ref: AttemptRef) -> HeldRow:
        """The current row of an attempt. Raises LeaseLost if the session does not hold it."""
        row = await runners.held(lent.conn, ref.key, epoch=ref.epoch, session=self.session)
        if row is None:
            raise LeaseLost("This session does not hold that attempt, or no longer does.")
        return row


class RunnerRoute(APIRoute):
    """A route that must declare its token: without one, registration fails."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        use = getattr(endpoint, "token_use", None)
        if not isinstance(use, RunnerTokenUse):
            raise TypeError(f"{path} declares no token: decorate {endpoint.__name__} with @shows(...)")
        self.token_use = use
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            context: ApiContext = request.app.state.context
            origin = request.client.host if request.client else "unknown"
            actor = "anonymous"
            try:
                request.state.runner = call = await _admit(request, context, origin, self.token_use)
                actor = f"runner:{session_text(call.session)}" if isinstance(call, SessionCall) else call.token.name
                return await answer(request)
            except (Unauthenticated, Forbidden) as refusal:
                await note_refusal(request, context, actor, origin, refusal, needs="runner")
                raise

        return guarded


async def _admit(request: Request, context: ApiContext, origin: str, use: RunnerTokenUse) -> JoinCall | SessionCall:
    secret = token_of(request.headers.get("authorization"))
    facts: dict[str, Any] = {"context": context, "origin": origin, "request_id": request.state.request_id}
    if use is RunnerTokenUse.SESSION:
        call: JoinCall | SessionCall = SessionCall(**facts, who=context.runner_tokens.read(secret))
    else:
        async with context.runners.lent() as conn:
            call = JoinCall(**facts, token=await find_token(conn, secret))
    context.agent_presence.called.set()
    return call


async def _call_of(request: Request) -> RunnerCall:
    """Async, because FastAPI runs plain functions in a thread."""
    found: RunnerCall = request.state.runner
    return found


Joining = Annotated[JoinCall, Depends(_call_of)]
Who = Annotated[SessionCall, Depends(_call_of)]
