"""Sign in with a password, a one-time link or a provider, sign out, and change your own password."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from evertick.api.auth import refuse_foreign
from evertick.api.context import ApiCaller, Who
from evertick.api.oidc.service import FLOW_SECONDS, Callback
from evertick.api.problems import headers_of, status_of
from evertick.api.sessions import NewPassword, change_password, end_session, set_cookie
from evertick.db.queries import accounts as accounts_queries
from evertick.domain.access import LONGEST_NAME, LONGEST_PASSWORD, SHORTEST_PASSWORD, Permission
from evertick.domain.errors import EvertickError, NotFound, ProviderUnavailable, RateLimited, Unauthenticated, UserError
from evertick.domain.oidc import Provider
from evertick.engine import accounts
from evertick.engine.accounts import Proof
from evertick.ui.layout import Form, done, form_of, page, page_router

router = page_router()

Next = Annotated[str, Query(alias="next", max_length=2000)]
Given = Annotated[str | None, Query(max_length=4000)]
ProviderName = Annotated[str, Path(max_length=40)]


@router.get("/login", Permission.OPEN)
async def show_login(request: Request, caller: Who, wanted: Next = "/") -> Response:
    return _login_page(request, caller, wanted=local(wanted))


@router.get("/login/{provider}", Permission.OPEN)
async def begin_sign_in(provider: ProviderName, request: Request, caller: Who, wanted: Next = "/") -> Response:
    """Send the browser to a sign-in provider."""
    try:
        url, cookie = await caller.context.oidc.begin(provider, local(wanted))
    except (NotFound, ProviderUnavailable) as error:
        return _login_page(request, caller, wanted=local(wanted), error=error)
    answer = RedirectResponse(url, status_code=303, headers={"Cache-Control": "no-store"})
    is_secure = request.url.scheme == "https"
    # The provider's page sends the browser back, and a browser sends no strict cookie then.
    answer.set_cookie(
        _flow_cookie(request), cookie, max_age=int(FLOW_SECONDS), httponly=True, secure=is_secure, samesite="lax"
    )
    return answer


@router.get("/login/{provider}/callback", Permission.OPEN)
async def finish_sign_in(
    provider: ProviderName,
    request: Request,
    caller: Who,
    code: Given = None,
    state: Annotated[str, Query(max_length=2000)] = "",
    iss: Given = None,
    error: Given = None,
) -> Response:
    """The provider sends the browser here. The page moves on by itself: after a redirect from another site, the browser would
    not send the new cookie."""
    cookie = request.cookies.get(_flow_cookie(request), "")
    given = Callback(code=code, state=state, issuer=iss, error=error, cookie=cookie)
    answer: Response
    try:
        issued, wanted = await caller.context.oidc.finish(provider, given, caller.actor)
        answer = page(request, "signed_in.html", wanted=wanted)
        set_cookie(request, answer, issued)
    except (UserError, ProviderUnavailable) as refusal:
        answer = _login_page(request, caller, error=refusal)
        async with caller.write() as conn:
            detail: dict[str, object] = {"login": provider, "why": str(refusal)}
            await accounts_queries.note(conn, verb="refuse", actor=caller.actor, detail=detail)
    answer.delete_cookie(_flow_cookie(request), secure=request.url.scheme == "https", httponly=True, samesite="lax")
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _flow_cookie(request: Request) -> str:
    return "__Host-evertick-signin" if request.url.scheme == "https" else "evertick_signin"


def _login_page(
    request: Request, caller: ApiCaller, *, wanted: str = "/", error: Exception | None = None, name: str = ""
) -> Response:
    status = 200 if error is None else status_of(error)[0].value
    choices: list[Provider] = []
    # Whatever is wrong with the providers, an administrator with a password must still be able to sign in.
    with suppress(EvertickError):
        choices = caller.context.oidc.choices
    text = None if error is None else str(error)
    return page(request, "login.html", status=status, wanted=wanted, error=text, name=name, providers=choices)


@router.post("/login", Permission.OPEN)
async def sign_in(request: Request, caller: Who) -> Response:
    refuse_foreign(request)
    form = await form_of(request)
    name, password = form.get("username", "").strip(), form.get("password", "")
    wanted = local(form.get("next", "/"))
    try:
        if not name or not password or len(name) > LONGEST_NAME or len(password) > LONGEST_PASSWORD:
            raise Unauthenticated("Enter your name and your password.")
        proof = Proof(name=name, password=password, actor=caller.actor)
        issued = await accounts.sign_in(caller.write, proof, means="browser")
    except (Unauthenticated, RateLimited) as error:
        response = _login_page(request, caller, wanted=wanted, error=error, name=name)
        response.headers.update(headers_of(error, status_of(error)[0]))
        return response
    answer = RedirectResponse(wanted, status_code=303)
    set_cookie(request, answer, issued)
    return answer


@router.get("/auth/link/{secret}", Permission.OPEN)
async def show_link(secret: str, request: Request, caller: Who) -> Response:
    """Show a button. A GET does not use up the link, because link previews in chats send one."""
    return page(request, "link.html")


@router.post("/logout", Permission.OWN)
async def sign_out(caller: Who) -> Response:
    answer = Response(status_code=204, headers={"HX-Redirect": "/login"})
    await end_session(caller, answer)
    return answer


@router.get("/account", Permission.OWN)
async def show_account(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        user = await accounts.find_user(conn, caller.principal.name)
    return page(request, "account.html", here="account", user=user, shortest=SHORTEST_PASSWORD)


@router.post("/account/password", Permission.OWN)
async def set_password(form: Form, caller: Who) -> Response:
    if form.get("password", "") != form.get("again", ""):
        raise UserError("The two new passwords differ. Enter the same password twice.")
    if any(len(value) > LONGEST_PASSWORD for value in form.values()):
        raise UserError(f"A password must have {SHORTEST_PASSWORD} to {LONGEST_PASSWORD} characters.")
    wanted = NewPassword(password=form.get("password", ""), current_password=form.get("current") or None)
    try:
        await change_password(wanted, caller)
    except Unauthenticated as error:
        # The page would take it for an ended session.
        raise UserError(str(error)) from None
    return done("Password changed. All your sessions and tokens ended: sign in again.", go="/login")


def local(address: str) -> str:
    """Return a path on this site, otherwise the home page: a link to the sign-in page cannot redirect to another site."""
    is_local = (
        address.startswith("/") and not address.startswith("//") and "\\" not in address and address.isprintable()
    )
    return address if is_local else "/"
