"""Sign in with a password or a one-time link, and sign out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from evertick.api.auth import refuse_foreign, requires
from evertick.api.context import Who
from evertick.api.problems import headers_of, status_of
from evertick.api.sessions import end_session, set_cookie
from evertick.domain.access import LONGEST_NAME, LONGEST_PASSWORD, Permission
from evertick.domain.errors import RateLimited, Unauthenticated
from evertick.engine import accounts
from evertick.ui.layout import PageRoute, form_of, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Next = Annotated[str, Query(alias="next", max_length=2000)]


@router.get("/login")
@requires(Permission.OPEN)
async def show_login(request: Request, caller: Who, wanted: Next = "/") -> Response:
    return page(request, "login.html", wanted=local(wanted), error=None, name="")


@router.post("/login")
@requires(Permission.OPEN)
async def sign_in(request: Request, caller: Who) -> Response:
    refuse_foreign(request)
    form = await form_of(request)
    name, password = form.get("username", "").strip(), form.get("password", "")
    wanted = local(form.get("next", "/"))
    try:
        if not name or not password or len(name) > LONGEST_NAME or len(password) > LONGEST_PASSWORD:
            raise Unauthenticated("Enter your name and your password.")
        issued = await accounts.sign_in(
            caller.write, name=name, password=password, origin=caller.origin, means="browser"
        )
    except (Unauthenticated, RateLimited) as error:
        status = status_of(error)[0]
        response = page(request, "login.html", status=status.value, wanted=wanted, error=str(error), name=name)
        response.headers.update(headers_of(error, status))
        return response
    answer = RedirectResponse(wanted, status_code=303)
    set_cookie(request, answer, issued)
    return answer


@router.get("/auth/link/{secret}")
@requires(Permission.OPEN)
async def show_link(secret: str, request: Request, caller: Who) -> Response:
    """Show a button. A GET does not use up the link, because link previews in chats send one."""
    return page(request, "link.html")


@router.post("/logout")
@requires(Permission.OWN)
async def sign_out(caller: Who) -> Response:
    answer = Response(status_code=204, headers={"HX-Redirect": "/login"})
    await end_session(caller, answer)
    return answer


def local(address: str) -> str:
    """Return a path on this site, otherwise the home page: a link to the sign-in page cannot redirect to another site."""
    is_local = (
        address.startswith("/") and not address.startswith("//") and "\\" not in address and address.isprintable()
    )
    return address if is_local else "/"
