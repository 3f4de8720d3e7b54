"""The caller's tokens and sessions, or those of all users for an admin. A token is shown once, when it is created."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.native.users import issue_token, whose
from evertick.api.paging import Cursor, cursor, read_cursor
from evertick.domain.access import Permission, Role
from evertick.domain.errors import UserError
from evertick.engine import accounts
from evertick.store import access
from evertick.ui.frame import PageRoute, done, form_of, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_SHOWN = 100


@router.get("/tokens")
@needs(Permission.OWN)
async def list_tokens(request: Request, caller: Who, cursor_text: Cursor = None) -> Response:
    (after,) = read_cursor(cursor_text, 0)
    async with caller.reading() as conn:
        found = await access.list_credentials(conn, account=whose(caller), after=after, limit=_SHOWN)
    roles = [role for role in Role if role.rank <= caller.principal.role.rank]
    next_cursor = cursor(found[-1].credential_id) if len(found) == _SHOWN else None
    return page(
        request,
        "tokens.html",
        here="tokens",
        rows=found,
        roles=roles,
        mine=caller.principal.credential_id,
        days=int(accounts.TOKEN_DAYS),
        next_cursor=next_cursor,
    )


@router.post("/tokens")
@needs(Permission.OWN)
async def make_token(request: Request, caller: Who) -> Response:
    form = await form_of(request)
    name, role = form.get("name", "").strip(), form.get("role", "")
    if not name:
        raise UserError("Enter a name for the token, so that you can recognize it later.")
    if role and role not in set(Role):
        raise UserError(f"Choose a role: {', '.join(Role)}.")
    try:
        days = float(form.get("days") or accounts.TOKEN_DAYS)
    except ValueError:
        raise UserError("Days must be a whole number; 0 means that the token does not expire.") from None
    made = await issue_token(caller, name=name, user=None, role=Role(role) if role else None, tags=None, days=days)
    return page(request, "secret_once.html", what="Your new token", secret=made.secret, until=made.expires_at)


@router.post("/tokens/{token_id}/revoke")
@needs(Permission.OWN)
async def revoke_token(token_id: Annotated[int, Path(ge=1, le=2**63 - 1)], caller: Who) -> Response:
    async with caller.changing() as conn:
        await accounts.revoke(conn, credential_id=token_id, actor=caller.actor, account=whose(caller))
    return done("Revoked. Requests that use it are refused from now on.")
