"""User management for admins: add users, change roles and tags, create one-time links, disable."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.desk import Who
from evertick.api.guard import needs
from evertick.api.paging import Cursor, cursor, read_cursor
from evertick.domain.access import LONGEST_NAME, Permission, Role
from evertick.domain.errors import UserError
from evertick.engine import accounts
from evertick.store import access
from evertick.ui.frame import PageRoute, done, form_of, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Name = Annotated[str, Path(max_length=LONGEST_NAME)]
_SHOWN = 100


@router.get("/users")
@needs(Permission.MANAGE_USERS)
async def list_users(request: Request, caller: Who, cursor_text: Cursor = None) -> Response:
    (after,) = read_cursor(cursor_text, "")
    async with caller.reading() as conn:
        found = await access.list_accounts(conn, after=after, limit=_SHOWN)
    next_cursor = cursor(found[-1].name) if len(found) == _SHOWN else None
    return page(request, "users.html", here="users", rows=found, roles=list(Role), next_cursor=next_cursor)


@router.post("/users")
@needs(Permission.MANAGE_USERS)
async def add_user(request: Request, caller: Who) -> Response:
    """Add a user. A user without a password signs in with a one-time link and sets one then."""
    form = await form_of(request)
    name = form.get("name", "").strip()
    async with caller.changing() as conn:
        await accounts.add_user(
            conn,
            name=name,
            role=_role(form.get("role", "")),
            tags=_tags(form.get("tags", "")),
            password=form.get("password") or None,
            actor=caller.actor,
        )
    return done(f"User {name} added.")


@router.post("/users/{name}")
@needs(Permission.MANAGE_USERS)
async def change_user(name: Name, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    tags = _tags(form.get("tags", ""))
    async with caller.changing() as conn:
        await accounts.change_user(
            conn, name=name, role=_role(form.get("role", "")), tags=tags, all_tags=tags is None, actor=caller.actor
        )
    return done(f"User {name} changed.")


@router.post("/users/{name}/disable")
@needs(Permission.MANAGE_USERS)
async def disable_user(name: Name, caller: Who) -> Response:
    async with caller.changing() as conn:
        await accounts.change_user(conn, name=name, disabled=True, actor=caller.actor)
    return done(f"User {name} disabled. All of its sessions and tokens are revoked.")


@router.post("/users/{name}/enable")
@needs(Permission.MANAGE_USERS)
async def enable_user(name: Name, caller: Who) -> Response:
    async with caller.changing() as conn:
        await accounts.change_user(conn, name=name, disabled=False, actor=caller.actor)
    return done(f"User {name} enabled.")


@router.post("/users/{name}/link")
@needs(Permission.MANAGE_USERS)
async def make_link(name: Name, request: Request, caller: Who) -> Response:
    """Create a one-time sign-in link. It is shown only once."""
    async with caller.changing() as conn:
        row = await accounts.find_user(conn, name)
        made = await accounts.issue(
            conn, row, kind="link", name="made by an admin", actor=caller.actor, seconds=accounts.LINK_SECONDS
        )
    link = f"{request.url.scheme}://{request.url.netloc}/auth/link/{made.secret}"
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
