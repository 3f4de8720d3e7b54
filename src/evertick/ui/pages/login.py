"""Sign in with a password or a one-time link, sign out, and change your own password."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from evertick.api.auth import refuse_foreign
from evertick.api.context import Who
from evertick.api.problems import headers_of, status_of
from evertick.api.sessions import NewPassword, change_password, end_session, set_cookie
from evertick.domain.access import LONGEST_NAME, LONGEST_PASSWORD, SHORTEST_PASSWORD, Permission
from evertick.domain.errors import RateLimited, Unauthenticated, UserError
from evertick.engine import accounts
from evertick.engine.accounts import Proof
from evertick.ui.layout import Form, done, form_of, page, page_router

router = page_router()

Next = Annotated[str, Query(alias="next", max_length=2000)]


@router.get("/login", Permission.OPEN)
async def show_login(request: Request, caller: Who, wanted: Next = "/") -> Response:
    return page(request, "login.html", wanted=local(wanted), error=None, name="")


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
        status = status_of(error)[0]
        response = page(request, "login.html", status=status.value, wanted=wanted, error=str(error), name=name)
        response.headers.update(headers_of(error, status))
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
