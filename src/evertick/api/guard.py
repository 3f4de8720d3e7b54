"""The door: every route names the permission that it needs, or the program does not start. Asked before anything is read.

A bearer token goes first, then the session cookie; with a cookie a change also needs the session's CSRF token and, where a
browser tells it, our own origin.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg
from fastapi import Request, Response
from fastapi.routing import APIRoute

from evertick.api.desk import NOBODY, Caller, Desk
from evertick.api.plain import plain_answer
from evertick.domain.access import MATRIX, Permission, Principal
from evertick.domain.errors import EvertickError, Forbidden, PostgresUnavailable, Refused
from evertick.store import access

# A browser keeps a __Host- cookie to itself and to this host; it takes one only over TLS.
SECURE_COOKIE, PLAIN_COOKIE = "__Host-evertick", "evertick_session"
CSRF_HEADER = "x-csrf-token"
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
# In a request that has been tried already: what went wrong.
ERROR = "evertick.error"
# Strangers who knock are noted once a minute each: the audit log must not be theirs to fill.
_NOTE_SECONDS = 60.0
_MOST_NOTED = 1000

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def needs(permission: Permission) -> Callable[[F], F]:
    """Marks a route's function with what it takes to call it."""

    def mark(function: F) -> F:
        function.permission = permission  # type: ignore[attr-defined]
        return function

    return mark


class GuardedRoute(APIRoute):
    """Without a permission there is no route."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        permission = getattr(endpoint, "permission", None)
        if not isinstance(permission, Permission) or permission not in MATRIX:
            raise TypeError(f"{path} names no permission: mark {endpoint.__name__} with @needs(...)")
        self.permission = permission
        super().__init__(path, endpoint, **options)
        self.answer_plainly = plain_answer(self)

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            if (error := request.scope.get(ERROR)) is not None:
                raise error
            request.state.caller = await admit(request, self.permission)
            if self.answer_plainly is not None and (response := await self.answer_plainly(request)) is not None:
                return response
            return await answer(request)

        return guarded


async def admit(request: Request, permission: Permission) -> Caller:
    """The caller, or an error. Every refusal is on record."""
    desk: Desk = request.app.state.desk
    origin = request.client.host if request.client else "unknown"
    caller = Caller(
        desk=desk, principal=NOBODY, permission=permission, origin=origin, request_id=request.state.request_id
    )
    if permission is Permission.OPEN:
        return caller
    try:
        secret, is_cookie = secret_of(request)
        found = await desk.remembered.who(desk.readers, secret)
        if found is None:
            raise Refused("This token or session is not valid: it is wrong, expired or revoked. Sign in again.")
        caller.principal = found.principal
        if is_cookie:
            caller.csrf = csrf_of(secret)
            _refuse_forgery(request, caller.csrf)
        caller.require(permission)
    except (Refused, Forbidden) as refusal:
        await _note_refusal(request, caller, refusal)
        raise
    if found.is_use_old and caller.principal.credential_id is not None:
        # That a token was used is no reason to fail the request.
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            async with desk.writers.lent() as conn:
                await access.note_use(conn, credential_id=caller.principal.credential_id, origin=origin)
    return caller


def secret_of(request: Request) -> tuple[str, bool]:
    """What the caller proves themselves with, and whether it is a cookie, which a browser sends by itself."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Refused("The Authorization header must be: Bearer TOKEN")
        return secret.strip(), False
    cookie = request.cookies.get(SECURE_COOKIE) or request.cookies.get(PLAIN_COOKIE)
    if not cookie:
        raise Refused("Sign in: send a token as `Authorization: Bearer TOKEN`, or the cookie of a session.")
    return cookie, True


def csrf_of(session_secret: str) -> str:
    """Known to whoever holds the session, and to nobody who only makes their browser send it."""
    return hashlib.sha256(b"csrf " + session_secret.encode("utf-8", "replace")).hexdigest()


def refuse_foreign(request: Request) -> None:
    """Browsers say from which page a request comes: only ours may change things."""
    source = request.headers.get("origin") or request.headers.get("referer")
    if source is not None and urlsplit(source).netloc != request.headers.get("host"):
        raise Forbidden("This request comes from another site's page.")
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise Forbidden("This request comes from another site's page.")


def refuse_foreign_reader(request: Request, caller: Caller) -> None:
    """For streams: a browser sends its cookie with them, too, and they last."""
    if caller.csrf is not None:
        refuse_foreign(request)


def _refuse_forgery(request: Request, csrf: str) -> None:
    if request.method in SAFE_METHODS:
        return
    refuse_foreign(request)
    given = request.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), csrf.encode()):
        raise Forbidden("A change with a session cookie needs its X-CSRF-Token; GET /auth/session tells it.")


async def _note_refusal(request: Request, caller: Caller, refusal: EvertickError) -> None:
    principal: Principal = caller.principal
    if principal is NOBODY and not is_first(request.app.state.strangers, caller.origin):
        return
    detail: dict[str, object] = {
        "method": request.method,
        "path": request.url.path[:500],
        "needs": caller.permission.value,
        "why": refusal.code,
    }
    actor = "anonymous" if principal is NOBODY else caller.actor
    # Nobody is let in because the refusal could not be written down.
    with suppress(psycopg.Error, PostgresUnavailable, OSError):
        async with caller.changing() as conn:
            await access.note(conn, verb="refuse", actor=actor, detail=detail)


def is_first(noted: dict[str, float], origin: str) -> bool:
    """Whether whoever is refused was not refused within the last minute."""
    now = time.monotonic()
    if now - noted.get(origin, -_NOTE_SECONDS) < _NOTE_SECONDS:
        return False
    if len(noted) >= _MOST_NOTED:
        noted.clear()
    noted[origin] = now
    return True
