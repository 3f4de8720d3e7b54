"""Authentication and authorization, before the request body is read. Every route must declare its permission at registration.

A bearer token takes precedence over the session cookie. With a cookie, a change also needs the session's CSRF token and, if the
browser sends an origin, the origin of this server.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import psycopg
from fastapi import APIRouter, Request, Response
from fastapi.datastructures import Default
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from psycopg import AsyncConnection

from evertick.api.context import ApiCaller, ApiContext
from evertick.api.fast_reads import plain_answer
from evertick.db.queries import accounts
from evertick.domain.access import MATRIX, Actor, Permission, Principal
from evertick.domain.errors import EvertickError, Forbidden, PostgresUnavailable, Unauthenticated
from evertick.engine.accounts import CHECK_AFTER_SECONDS
from evertick.operations.caller import ANONYMOUS, similar

# Browsers accept a __Host- cookie only over TLS and send it only to this host.
SECURE_COOKIE, PLAIN_COOKIE = "__Host-evertick", "evertick_session"
CSRF_HEADER = "x-csrf-token"
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
# Request state: the error of an authentication that already failed.
ERROR = "evertick.error"
# Refusals are recorded once a minute per address, so that clients cannot flood the audit log.
_NOTE_SECONDS = 60.0
_MOST_NOTED = 1000

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
# The framework takes the model of the response from the return annotation.
_INFERRED = Default(None)


class Register(Protocol):
    """Adds a function as the endpoint of a route."""

    def __call__(self, function: F, /) -> F: ...


def requires(permission: Permission) -> Callable[[F], F]:
    """Declare the permission that a route needs."""

    def mark(function: F) -> F:
        function.permission = permission  # type: ignore[attr-defined]
        return function

    return mark


class GuardedRoute(APIRoute):
    """A route that must declare its permission: without one, registration fails."""

    # Whether a query parameter that the route does not have is an error. Airflow's API and pages ignore it.
    refuses_unknown = False

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        permission = getattr(endpoint, "permission", None)
        if not isinstance(permission, Permission) or permission not in MATRIX:
            raise TypeError(f"{path} declares no permission: decorate {endpoint.__name__} with @requires(...)")
        self.permission = permission
        super().__init__(path, endpoint, **options)
        self.known_query = frozenset(each.alias for each in self.dependant.query_params)
        self.answer_plainly = plain_answer(self, known_query=self.known_query if self.refuses_unknown else None)

    def get_route_handler(self) -> Handler:
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            if (error := request.scope.get(ERROR)) is not None:
                raise error
            request.state.caller = await authenticate(request, self.permission)
            if self.refuses_unknown:
                refuse_unknown(request.query_params, self.known_query)
            if self.answer_plainly is not None and (response := await self.answer_plainly(request)) is not None:
                return response
            return await answer(request)

        return guarded


class NativeRoute(GuardedRoute):
    """A route of the native API."""

    refuses_unknown = True


def refuse_unknown(query: Collection[str], known: Collection[str]) -> None:
    """A misspelled filter would return everything."""
    otherwise = f"This operation has: {', '.join(sorted(known)) or 'none'}."
    errors = [
        {"loc": ("query", name), "msg": f"Unknown query parameter. {similar(name, sorted(known), otherwise)}"}
        for name in query
        if name not in known
    ]
    if errors:
        raise RequestValidationError(errors)


class GuardedRouter(APIRouter):
    """A router that takes the permission of each route next to its path."""

    def __init__(self, route_class: type[GuardedRoute] = GuardedRoute, **options: Any) -> None:
        super().__init__(route_class=route_class, **options)

    def get(self, path: str, permission: Permission, answer: Any = _INFERRED, **options: Any) -> Register:  # type: ignore[override]
        return self._guarded("GET", path, permission, answer, options)

    def post(self, path: str, permission: Permission, answer: Any = _INFERRED, **options: Any) -> Register:  # type: ignore[override]
        return self._guarded("POST", path, permission, answer, options)

    def put(self, path: str, permission: Permission, answer: Any = _INFERRED, **options: Any) -> Register:  # type: ignore[override]
        return self._guarded("PUT", path, permission, answer, options)

    def patch(self, path: str, permission: Permission, answer: Any = _INFERRED, **options: Any) -> Register:  # type: ignore[override]
        return self._guarded("PATCH", path, permission, answer, options)

    def delete(self, path: str, permission: Permission, **options: Any) -> Register:  # type: ignore[override]
        return self._guarded("DELETE", path, permission, _INFERRED, options)

    def _guarded(
        self, method: str, path: str, permission: Permission, answer: Any, options: dict[str, Any]
    ) -> Register:
        def register(function: F) -> F:
            self.add_api_route(path, requires(permission)(function), methods=[method], response_model=answer, **options)
            return function

        return register


async def authenticate(request: Request, permission: Permission) -> ApiCaller:
    """Return the caller or raise an error. Refusals are recorded in the audit log."""
    context: ApiContext = request.app.state.context
    origin = request.client.host if request.client else "unknown"
    caller = ApiCaller(
        context=context, principal=ANONYMOUS, permission=permission, origin=origin, request_id=request.state.request_id
    )
    if permission is Permission.OPEN:
        return caller
    try:
        secret, is_cookie = secret_of(request)
        found = await context.auth_cache.authenticate(context.readers, secret)
        if found is not None and (found.check_age_seconds or 0) > CHECK_AFTER_SECONDS:
            found = await context.oidc.checked(found, secret)
        if found is None:
            raise Unauthenticated("Invalid token or session: it is wrong, expired or revoked. Sign in again.")
        caller.principal = found.principal
        if is_cookie:
            caller.csrf = csrf_of(secret)
            _refuse_forgery(request, caller.csrf)
        caller.require(permission)
    except (Unauthenticated, Forbidden) as refusal:
        await _note_refusal(request, caller, refusal)
        raise
    if found.is_use_old and caller.principal.credential_id is not None:
        # Failing to record the use of the token does not fail the request.
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            async with context.writers.lent() as conn:
                await accounts.note_use(conn, credential_id=caller.principal.credential_id, origin=origin)
    return caller


def secret_of(request: Request) -> tuple[str, bool]:
    """The caller's secret, and whether it came as a cookie, which browsers send automatically."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthenticated("Invalid Authorization header. Send: Authorization: Bearer TOKEN")
        return secret.strip(), False
    # Over TLS, a cookie without the prefix may have been set by another host of the domain.
    cookie = request.cookies.get(SECURE_COOKIE if request.url.scheme == "https" else PLAIN_COOKIE)
    if not cookie:
        raise Unauthenticated("Not signed in. Send a token as `Authorization: Bearer TOKEN`, or a session cookie.")
    return cookie, True


def csrf_of(session_secret: str) -> str:
    """The CSRF token: known to the session's owner, unknown to a site that makes the browser send a request."""
    return hashlib.sha256(b"csrf " + session_secret.encode("utf-8", "replace")).hexdigest()


def refuse_foreign(request: Request) -> None:
    """Refuse changes that a page of another site makes the browser send."""
    source = request.headers.get("origin") or request.headers.get("referer")
    if source is not None and urlsplit(source).netloc != request.headers.get("host"):
        raise Forbidden("The request was sent by a page of another site.")
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise Forbidden("The request was sent by a page of another site.")


def refuse_foreign_reader(request: Request, caller: ApiCaller) -> None:
    """The same check for streams: browsers send cookies with them, and they hold resources."""
    if caller.csrf is not None:
        refuse_foreign(request)


def _refuse_forgery(request: Request, csrf: str) -> None:
    if request.method in SAFE_METHODS:
        return
    refuse_foreign(request)
    given = request.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(given.encode(), csrf.encode()):
        raise Forbidden(
            "A change with a session cookie needs the X-CSRF-Token header. GET /auth/session returns the token."
        )


async def _note_refusal(request: Request, caller: ApiCaller, refusal: EvertickError) -> None:
    principal: Principal = caller.principal
    if principal is ANONYMOUS and not is_first(request.app.state.strangers, caller.origin):
        return
    actor = replace(caller.actor, name="anonymous") if principal is ANONYMOUS else caller.actor
    await record_refusal(request, caller.write(), actor, refusal, needs=caller.permission.value)


async def record_refusal(
    request: Request,
    lent: AbstractAsyncContextManager[AsyncConnection],
    actor: Actor,
    refusal: EvertickError,
    *,
    needs: str,
) -> None:
    path = request.url.path[:500]
    detail: dict[str, object] = {"method": request.method, "path": path, "needs": needs, "why": refusal.code}
    # The request is refused even if the refusal cannot be recorded.
    with suppress(psycopg.Error, PostgresUnavailable, OSError):
        async with lent as conn:
            await accounts.note(conn, verb="refuse", actor=actor, detail=detail)


def is_first(noted: dict[str, float], origin: str) -> bool:
    """Whether this client was not refused within the last minute."""
    now = time.monotonic()
    if now - noted.get(origin, -_NOTE_SECONDS) < _NOTE_SECONDS:
        return False
    if len(noted) >= _MOST_NOTED:
        noted.clear()
    noted[origin] = now
    return True
