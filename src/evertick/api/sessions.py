"""`/auth`: sign in and out with tokens for programs, cookies for browsers and one-time links for the first sign-in."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from evertick.api.auth import PLAIN_COOKIE, SECURE_COOKIE, GuardedRouter, csrf_of, refuse_foreign
from evertick.api.context import ApiCaller, Who
from evertick.domain.access import LONGEST_NAME, LONGEST_PASSWORD, MATRIX, Permission
from evertick.domain.errors import Unauthenticated
from evertick.engine import accounts
from evertick.engine.accounts import Issued, Proof

router = GuardedRouter(prefix="/auth", tags=["auth"])


class SignIn(BaseModel):
    model_config = ConfigDict(extra="forbid")
    username: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    password: Annotated[str, Field(min_length=1, max_length=LONGEST_PASSWORD)]


class AccessToken(BaseModel):
    access_token: str


class SignedIn(BaseModel):
    """The signed-in user, its permissions, and the CSRF token that pages send with each change."""

    user: str
    role: str
    tags: list[str] | None
    permissions: list[str]
    csrf_token: str | None


class NewPassword(BaseModel):
    model_config = ConfigDict(extra="forbid")
    password: Annotated[str, Field(max_length=LONGEST_PASSWORD)]
    current_password: Annotated[str, Field(max_length=LONGEST_PASSWORD)] | None = None


@router.post("/token", Permission.OPEN, status_code=201)
async def make_token(request: Request, caller: Who) -> AccessToken:
    """Create a bearer token from a user name and password, sent as JSON or as a form. It expires after twelve hours."""
    issued = await accounts.sign_in(caller.write, await _proof(request, caller), means="token")
    return AccessToken(access_token=issued.secret)


@router.post("/token/cli", Permission.OPEN, status_code=201)
async def make_cli_token(request: Request, caller: Who) -> AccessToken:
    """The same for one hour: Airflow's command line signs in here."""
    proof = await _proof(request, caller)
    issued = await accounts.sign_in(caller.write, proof, means="cli", seconds=accounts.CLI_TOKEN_SECONDS)
    return AccessToken(access_token=issued.secret)


@router.post("/login", Permission.OPEN)
async def sign_in(request: Request, response: Response, caller: Who) -> SignedIn:
    """Sign in with a browser. Sets the session cookie."""
    refuse_foreign(request)
    issued = await accounts.sign_in(caller.write, await _proof(request, caller), means="browser")
    set_cookie(request, response, issued)
    async with caller.read() as conn:
        found = await accounts.authenticate(conn, issued.secret)
    if found is None:
        raise Unauthenticated("The session has already ended. Sign in again.")
    caller.principal = found.principal
    return _described(caller, csrf_of(issued.secret))


@router.post("/link/{secret}", Permission.OPEN, status_code=303, response_class=RedirectResponse)
async def take_link(secret: str, request: Request, caller: Who) -> RedirectResponse:
    """Sign in with a one-time link."""
    refuse_foreign(request)
    async with caller.write() as conn:
        issued = await accounts.sign_in_by_link(conn, secret=secret, actor=caller.actor)
    response = RedirectResponse("/", status_code=303)
    set_cookie(request, response, issued)
    return response


@router.get("/session", Permission.OWN)
async def show_session(caller: Who) -> SignedIn:
    """Return the signed-in user."""
    return _described(caller, caller.csrf)


@router.post("/logout", Permission.OWN, status_code=204)
async def sign_out(response: Response, caller: Who) -> None:
    """Sign out: end the session, or revoke the token of this request."""
    await end_session(caller, response)


async def end_session(caller: ApiCaller, response: Response) -> None:
    assert caller.principal.credential_id is not None
    async with caller.write() as conn:
        await accounts.revoke(conn, credential_id=caller.principal.credential_id, actor=caller.actor)
    response.delete_cookie(SECURE_COOKIE, secure=True, httponly=True, samesite="strict")
    response.delete_cookie(PLAIN_COOKIE, httponly=True, samesite="strict")


@router.put("/password", Permission.OWN, status_code=204)
async def change_password(wanted: NewPassword, caller: Who) -> None:
    """Change your own password. Ends all of your sessions and tokens, including this one."""
    # A token with fewer permissions than its user must not set the password, which grants all of them.
    if not caller.principal.is_session:
        raise Unauthenticated("Changing a password needs a session. Sign in with your password first.")
    proof = Proof(name=caller.principal.name, password=wanted.current_password or "", actor=caller.actor)
    await accounts.change_own_password(caller.write, proof, password=wanted.password)


async def _proof(request: Request, caller: ApiCaller) -> Proof:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    try:
        if kind == "application/json":
            given = json.loads(body)
        elif kind == "application/x-www-form-urlencoded":
            given = {name: values[0] for name, values in parse_qs(body.decode()).items()}
            given = {name: given[name] for name in ("username", "password") if name in given}
        else:
            raise HTTPException(415, "Unsupported content type. Send the name and password as JSON or as a form.")
        login = SignIn.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_input=False, include_context=False)) from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "The request body is neither a JSON object nor a form.") from None
    return Proof(name=login.username, password=login.password, actor=caller.actor)


def set_cookie(request: Request, response: Response, issued: Issued) -> None:
    is_secure = request.url.scheme == "https"
    response.set_cookie(
        SECURE_COOKIE if is_secure else PLAIN_COOKIE,
        issued.secret,
        max_age=int(accounts.SESSION_SECONDS),
        httponly=True,
        secure=is_secure,
        samesite="strict",
        path="/",
    )


def _described(caller: ApiCaller, csrf: str | None) -> SignedIn:
    principal = caller.principal
    return SignedIn(
        user=principal.name,
        role=principal.role,
        tags=None if principal.tags is None else sorted(principal.tags),
        permissions=[each.value for each in MATRIX if principal.may(each)],
        csrf_token=csrf,
    )
