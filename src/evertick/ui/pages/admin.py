"""Pages for admins: users and their roles, API tokens, the audit log, and stored values.

A secret is shown once, when it is created.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from evertick.api.context import Who
from evertick.db.queries import accounts as accounts_queries
from evertick.db.queries import secrets
from evertick.domain.access import LONGEST_NAME, Permission, Role
from evertick.domain.errors import UserError
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind
from evertick.engine import accounts
from evertick.operations import users, values
from evertick.operations.paging import Cursor, encode_cursor, read_cursor
from evertick.operations.users import NewToken, NewUser, TokenId, UserChange
from evertick.operations.values import ValueRequest, read_shown
from evertick.ui.layout import Form, done, page, page_router, segment

router = page_router()


Name = Annotated[str, Path(max_length=LONGEST_NAME)]


_SHOWN = 100


@router.get("/users", Permission.MANAGE_USERS)
async def list_users(request: Request, caller: Who, cursor: Cursor = None) -> Response:
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        found = await accounts_queries.list_accounts(conn, after=after, limit=_SHOWN)
    next_cursor = encode_cursor(found[-1].name) if len(found) == _SHOWN else None
    return page(request, "users.html", here="users", rows=found, roles=list(Role), next_cursor=next_cursor)


@router.post("/users", Permission.MANAGE_USERS)
async def add_user(form: Form, caller: Who) -> Response:
    """Add a user. A user without a password signs in with a one-time link and sets one then."""
    name = form.get("name", "").strip()
    wanted = NewUser(
        name=name,
        role=_role(form.get("role", "")),
        tags=_tags(form.get("tags", "")),
        password=form.get("password") or None,
    )
    await users.add_user(caller, body=wanted)
    return done(f"User {name} added.")


@router.post("/users/{name}", Permission.MANAGE_USERS)
async def change_user(name: Name, form: Form, caller: Who) -> Response:
    tags = _tags(form.get("tags", ""))
    wanted = UserChange(role=_role(form.get("role", "")), tags=tags, all_dags=tags is None)
    await users.change_user(caller, name=name, body=wanted)
    return done(f"User {name} changed.")


@router.post("/users/{name}/disable", Permission.MANAGE_USERS)
async def disable_user(name: Name, caller: Who) -> Response:
    await users.change_user(caller, name=name, body=UserChange(is_disabled=True))
    return done(f"User {name} disabled. All of its sessions and tokens are revoked.")


@router.post("/users/{name}/enable", Permission.MANAGE_USERS)
async def enable_user(name: Name, caller: Who) -> Response:
    await users.change_user(caller, name=name, body=UserChange(is_disabled=False))
    return done(f"User {name} enabled.")


@router.post("/users/{name}/link", Permission.MANAGE_USERS)
async def make_link(name: Name, request: Request, caller: Who) -> Response:
    """Create a one-time sign-in link. It is shown only once."""
    made = await users.make_link(caller, name=name)
    link = f"{request.url.scheme}://{request.url.netloc}{made.path}"
    return page(
        request, "secret_once.html", what=f"One-time sign-in link for {name}", secret=link, until=made.expires_at
    )


def _role(text: str) -> Role:
    if text not in set(Role):
        raise UserError(f"Choose a role: {', '.join(Role)}.")
    return Role(text)


def _tags(text: str) -> list[str] | None:
    """Parse comma-separated tags. None means every DAG."""
    return [each.strip() for each in text.split(",") if each.strip()] or None


@router.get("/tokens", Permission.OWN)
async def list_tokens(request: Request, caller: Who, cursor: Cursor = None) -> Response:
    found = await users.list_tokens(caller, limit=_SHOWN, cursor=cursor)
    roles = [role for role in Role if role.rank <= caller.principal.role.rank]
    return page(
        request,
        "tokens.html",
        here="tokens",
        rows=found.items,
        roles=roles,
        mine=caller.principal.credential_id,
        days=int(accounts.TOKEN_DAYS),
        next_cursor=found.next_cursor,
    )


@router.post("/tokens", Permission.OWN)
async def make_token(request: Request, form: Form, caller: Who) -> Response:
    name, role = form.get("name", "").strip(), form.get("role", "")
    if not name:
        raise UserError("Enter a name for the token, so that you can recognize it later.")
    chosen = _role(role) if role else None
    try:
        days = float(form.get("days") or accounts.TOKEN_DAYS)
    except ValueError:
        raise UserError("Days must be a whole number; 0 means that the token does not expire.") from None
    made = await users.make_token(caller, body=NewToken(name=name, role=chosen, days=days))
    return page(request, "secret_once.html", what="Your new token", secret=made.token, until=made.expires_at)


@router.post("/tokens/{token_id}/revoke", Permission.OWN)
async def revoke_token(token_id: TokenId, caller: Who) -> Response:
    await users.revoke_token(caller, token_id=token_id)
    return done("Revoked. Requests that use it are refused from now on.")


Text = Annotated[str, Query(max_length=300)]


@router.get("/audit", Permission.READ_AUDIT)
async def list_entries(
    request: Request, caller: Who, verb: Text = "", actor: Text = "", dag: Text = "", cursor: Cursor = None
) -> Response:
    found = await users.list_audit(
        caller, verb=verb or None, actor=actor or None, dag=dag or None, limit=_SHOWN, cursor=cursor
    )
    return page(
        request,
        "audit.html",
        here="audit",
        rows=found.items,
        verb=verb,
        actor=actor,
        dag=dag,
        is_first=cursor is None,
        next_cursor=found.next_cursor,
    )


ValueName = Annotated[str, Path(max_length=200)]


_MOST = 1000


_LONGEST_ABOUT = 1000


def _add_routes(kind: ValueKind) -> None:
    """Add the four routes of one kind."""

    @router.get(f"/{kind}s", Permission.READ_VALUES, name=f"list_{kind}s")
    async def list_values(request: Request, caller: Who) -> Response:
        async with caller.read() as conn:
            found = await secrets.list_all(conn, kind=kind, limit=_MOST)
        return page(request, "values.html", here=f"{kind}s", kind=kind.value, rows=found, longest=LONGEST_VALUE)

    @router.get(f"/{kind}s/{{name}}", Permission.READ_VALUES, name=f"show_{kind}")
    async def show_value(name: ValueName, request: Request, caller: Who) -> Response:
        async with caller.read() as conn:
            row, value = await read_shown(caller, conn, kind, name)
        return page(
            request, "value.html", here=f"{kind}s", kind=kind.value, row=row, value=value, longest=LONGEST_VALUE
        )

    @router.post(f"/{kind}s", Permission.EDIT_VALUES, name=f"put_{kind}")
    async def put_value(form: Form, caller: Who) -> Response:
        name = form.get("name", "").strip()
        # Browsers send the lines of a text field with \r\n.
        value = form.get("value", "").replace("\r\n", "\n")
        wanted = ValueRequest(value=value, description=form.get("description", "").strip()[:_LONGEST_ABOUT] or None)
        is_new = (await values.put_value(caller, kind=kind, name=name, body=wanted)).record.is_new
        change = "created" if is_new else "changed"
        return done(f"{kind.capitalize()} {name} {change}.", go=f"/{kind}s/{segment(name)}")

    @router.post(f"/{kind}s/{{name}}/delete", Permission.EDIT_VALUES, name=f"delete_{kind}")
    async def delete_value(name: ValueName, caller: Who) -> Response:
        await values.delete_value(caller, kind=kind, name=name)
        return done(f"{kind.capitalize()} {name} deleted.", go=f"/{kind}s")


for each in ValueKind:
    _add_routes(each)
