"""Pages for admins: users and their roles, API tokens, the audit log, and stored values.

A secret is shown once, when it is created.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from evertick.api.auth import requires
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import accounts as accounts_queries
from evertick.db.queries import secrets
from evertick.db.queries.accounts import AuditFilter
from evertick.domain.access import LONGEST_NAME, Permission, Role
from evertick.domain.errors import UserError
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind
from evertick.engine import accounts
from evertick.engine import secrets as verbs
from evertick.operations import users
from evertick.operations.paging import LARGEST, Cursor, encode_cursor, read_cursor
from evertick.operations.users import NewToken, NewUser, TokenId, UserChange
from evertick.operations.values import keyring_of, read_shown
from evertick.ui.layout import PageRoute, done, form_of, page, segment

router = APIRouter(route_class=PageRoute, include_in_schema=False)


Name = Annotated[str, Path(max_length=LONGEST_NAME)]


_SHOWN = 100


@router.get("/users")
@requires(Permission.MANAGE_USERS)
async def list_users(request: Request, caller: Who, cursor: Cursor = None) -> Response:
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        found = await accounts_queries.list_accounts(conn, after=after, limit=_SHOWN)
    next_cursor = encode_cursor(found[-1].name) if len(found) == _SHOWN else None
    return page(request, "users.html", here="users", rows=found, roles=list(Role), next_cursor=next_cursor)


@router.post("/users")
@requires(Permission.MANAGE_USERS)
async def add_user(request: Request, caller: Who) -> Response:
    """Add a user. A user without a password signs in with a one-time link and sets one then."""
    form = await form_of(request)
    name = form.get("name", "").strip()
    wanted = NewUser(
        name=name,
        role=_role(form.get("role", "")),
        tags=_tags(form.get("tags", "")),
        password=form.get("password") or None,
    )
    await users.add_user(caller, body=wanted)
    return done(f"User {name} added.")


@router.post("/users/{name}")
@requires(Permission.MANAGE_USERS)
async def change_user(name: Name, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    tags = _tags(form.get("tags", ""))
    wanted = UserChange(role=_role(form.get("role", "")), tags=tags, all_dags=tags is None)
    await users.change_user(caller, name=name, body=wanted)
    return done(f"User {name} changed.")


@router.post("/users/{name}/disable")
@requires(Permission.MANAGE_USERS)
async def disable_user(name: Name, caller: Who) -> Response:
    await users.change_user(caller, name=name, body=UserChange(is_disabled=True))
    return done(f"User {name} disabled. All of its sessions and tokens are revoked.")


@router.post("/users/{name}/enable")
@requires(Permission.MANAGE_USERS)
async def enable_user(name: Name, caller: Who) -> Response:
    await users.change_user(caller, name=name, body=UserChange(is_disabled=False))
    return done(f"User {name} enabled.")


@router.post("/users/{name}/link")
@requires(Permission.MANAGE_USERS)
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


@router.get("/tokens")
@requires(Permission.OWN)
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


@router.post("/tokens")
@requires(Permission.OWN)
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
    made = await users.make_token(caller, body=NewToken(name=name, role=Role(role) if role else None, days=days))
    return page(request, "secret_once.html", what="Your new token", secret=made.token, until=made.expires_at)


@router.post("/tokens/{token_id}/revoke")
@requires(Permission.OWN)
async def revoke_token(token_id: TokenId, caller: Who) -> Response:
    await users.revoke_token(caller, token_id=token_id)
    return done("Revoked. Requests that use it are refused from now on.")


Text = Annotated[str, Query(max_length=300)]


_SHOWN_ENTRIES, _LOOKED_AT = 100, 10_000


@router.get("/audit")
@requires(Permission.READ_AUDIT)
async def list_entries(
    request: Request, caller: Who, verb: Text = "", actor: Text = "", dag: Text = "", cursor: Cursor = None
) -> Response:
    (before,) = read_cursor(cursor, LARGEST)
    wanted = AuditFilter(verb=verb or None, actor=actor or None, dag=dag or None)
    async with caller.read() as conn:
        found, end = await accounts_queries.audit_page(
            conn, wanted, before=before, limit=_SHOWN_ENTRIES, window=_LOOKED_AT
        )
    return page(
        request,
        "audit.html",
        here="audit",
        rows=found,
        verb=verb,
        actor=actor,
        dag=dag,
        is_first=cursor is None,
        next_cursor=None if end is None else encode_cursor(end),
    )


ValueName = Annotated[str, Path(max_length=200)]


_MOST = 1000


_LONGEST_ABOUT = 1000


def _add_routes(kind: ValueKind) -> None:
    """Add the four routes of one kind."""

    @router.get(f"/{kind}s", name=f"list_{kind}s")
    @requires(Permission.READ_VALUES)
    async def list_values(request: Request, caller: Who) -> Response:
        async with caller.read() as conn:
            found = await secrets.list_all(conn, kind=kind, limit=_MOST)
        return page(request, "values.html", here=f"{kind}s", kind=kind.value, rows=found, longest=LONGEST_VALUE)

    @router.get(f"/{kind}s/{{name}}", name=f"show_{kind}")
    @requires(Permission.READ_VALUES)
    async def show_value(name: ValueName, request: Request, caller: Who) -> Response:
        async with caller.read() as conn:
            row, value = await read_shown(caller, conn, kind, name)
        return page(
            request, "value.html", here=f"{kind}s", kind=kind.value, row=row, value=value, longest=LONGEST_VALUE
        )

    @router.post(f"/{kind}s", name=f"put_{kind}")
    @requires(Permission.EDIT_VALUES)
    async def put_value(request: Request, caller: Who) -> Response:
        return await _put(request, caller, kind)

    @router.post(f"/{kind}s/{{name}}/delete", name=f"delete_{kind}")
    @requires(Permission.EDIT_VALUES)
    async def delete_value(name: ValueName, caller: Who) -> Response:
        async with caller.write() as conn:
            await verbs.delete_value(conn, kind=kind, name=name, actor=caller.actor)
        return done(f"{kind.capitalize()} {name} deleted.", go=f"/{kind}s")


for each in ValueKind:
    _add_routes(each)


async def _put(request: Request, caller: ApiCaller, kind: ValueKind) -> Response:
    form = await form_of(request)
    name, keyring = form.get("name", "").strip(), keyring_of(caller)
    # Browsers send the lines of a text field with \r\n.
    value = form.get("value", "").replace("\r\n", "\n")
    async with caller.write() as conn:
        is_new = await verbs.put_value(
            conn,
            keyring,
            kind=kind,
            name=name,
            value=value,
            actor=caller.actor,
            description=form.get("description", "").strip()[:_LONGEST_ABOUT] or None,
        )
    return done(f"{kind.capitalize()} {name} {'created' if is_new else 'changed'}.", go=f"/{kind}s/{segment(name)}")
