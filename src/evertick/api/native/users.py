"""Users and tokens. Secrets go out once, when a token is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Caller, Who
from evertick.api.paging import USUAL_ITEMS, Cursor, Limit, Page, cursor, read_cursor
from evertick.db.queries import accounts as accounts_queries
from evertick.db.queries.accounts import AccountRow, CredentialRow
from evertick.domain.access import LONGEST_NAME, LONGEST_PASSWORD, MOST_TAGS, Permission, Role, narrowed
from evertick.domain.errors import Forbidden
from evertick.engine import accounts
from evertick.engine.accounts import Issued

router = APIRouter(route_class=GuardedRoute, tags=["users"])

Name = Annotated[str, Path(max_length=LONGEST_NAME)]
Tags = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]], Field(min_length=1, max_length=MOST_TAGS)
]
NewName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Password = Annotated[str, Field(min_length=1, max_length=LONGEST_PASSWORD)]


class User(BaseModel):
    name: str
    role: Role
    tags: list[str] | None
    has_password: bool
    is_disabled: bool
    created_by: str
    created_at: datetime
    password_changed_at: datetime | None


class NewUser(BaseModel):
    """Without a password it comes with tokens only."""

    model_config = ConfigDict(extra="forbid")
    name: NewName
    role: Role = Role.VIEWER
    tags: Tags | None = None
    password: Password | None = None


class UserChange(BaseModel):
    """What is left out stays as it is. `all_dags` lifts the limit to tags."""

    model_config = ConfigDict(extra="forbid")
    role: Role | None = None
    tags: Tags | None = None
    all_dags: bool = False
    is_disabled: bool | None = None
    password: Password | None = None


class Link(BaseModel):
    """Where to sign in, once: under the server's address."""

    path: str
    expires_at: datetime | None


class Token(BaseModel):
    id: int
    user: str
    kind: str
    name: str
    role: Role | None
    tags: list[str] | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None
    used_from: str | None


class NewToken(BaseModel):
    """`role` and `tags` can only take away from what the user may. `user` is oneself if left out."""

    model_config = ConfigDict(extra="forbid")
    name: NewName
    user: NewName | None = None
    role: Role | None = None
    tags: Tags | None = None
    days: Annotated[float, Field(ge=0, le=accounts.MOST_TOKEN_DAYS)] = accounts.TOKEN_DAYS


class MadeToken(BaseModel):
    """`token` is shown this once."""

    id: int
    token: str
    expires_at: datetime | None


@router.get("/users")
@requires(Permission.MANAGE_USERS)
async def list_users(caller: Who, limit: Limit = USUAL_ITEMS, cursor_text: Cursor = None) -> Page[User]:
    (after,) = read_cursor(cursor_text, "")
    async with caller.reading() as conn:
        found = await accounts_queries.list_accounts(conn, after=after, limit=limit)
    next_cursor = cursor(found[-1].name) if len(found) == limit else None
    return Page(items=[_user(row) for row in found], next_cursor=next_cursor)


@router.post("/users", status_code=201)
@requires(Permission.MANAGE_USERS)
async def add_user(wanted: NewUser, caller: Who) -> User:
    async with caller.changing() as conn:
        await accounts.add_user(
            conn,
            name=wanted.name,
            role=wanted.role,
            tags=wanted.tags,
            password=wanted.password,
            actor=caller.actor,
        )
        return _user(await accounts.find_user(conn, wanted.name.strip()))


@router.get("/users/{name}")
@requires(Permission.MANAGE_USERS)
async def show_user(name: Name, caller: Who) -> User:
    async with caller.reading() as conn:
        return _user(await accounts.find_user(conn, name))


@router.patch("/users/{name}")
@requires(Permission.MANAGE_USERS)
async def change_user(name: Name, wanted: UserChange, caller: Who) -> User:
    """A new password, or being disabled, ends all sessions and tokens of the user."""
    async with caller.changing() as conn:
        await accounts.change_user(
            conn,
            name=name,
            role=wanted.role,
            tags=wanted.tags,
            all_tags=wanted.all_dags,
            disabled=wanted.is_disabled,
            actor=caller.actor,
        )
        if wanted.password is not None:
            await accounts.set_password(conn, name=name, password=wanted.password, actor=caller.actor)
        return _user(await accounts.find_user(conn, name))


@router.post("/users/{name}/link", status_code=201)
@requires(Permission.MANAGE_USERS)
async def make_link(name: Name, caller: Who) -> Link:
    """Somebody signs in with it once, within the hour. Not for oneself with a token: that would make more of it."""
    _refuse_own(caller, name)
    async with caller.changing() as conn:
        row = await accounts.find_user(conn, name)
        made = await accounts.issue(
            conn, row, kind="link", name="link", actor=caller.actor, seconds=accounts.LINK_SECONDS
        )
    return Link(path=f"/auth/link/{made.secret}", expires_at=made.expires_at)


@router.get("/tokens")
@requires(Permission.OWN)
async def list_tokens(
    caller: Who,
    user: Annotated[str | None, Query(max_length=LONGEST_NAME)] = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[Token]:
    """One's own tokens and sessions that are valid; those of everybody, or of one user, for who manages users."""
    (after,) = read_cursor(cursor_text, 0)
    if user is not None and user.lower() != caller.principal.name.lower():
        caller.require(Permission.MANAGE_USERS)
    async with caller.reading() as conn:
        if user is not None:
            await accounts.find_user(conn, user)
        account = user if user is not None else whose(caller)
        found = await accounts_queries.list_credentials(conn, account=account, after=after, limit=limit)
    next_cursor = cursor(found[-1].credential_id) if len(found) == limit else None
    return Page(items=[_token(row) for row in found], next_cursor=next_cursor)


@router.post("/tokens", status_code=201)
@requires(Permission.OWN)
async def make_token(wanted: NewToken, caller: Who) -> MadeToken:
    """A token of one's own, or of another user for who manages users. It never may more than whoever made it."""
    made = await issue_token(
        caller, name=wanted.name, user=wanted.user, role=wanted.role, tags=wanted.tags, days=wanted.days
    )
    return MadeToken(id=made.credential_id, token=made.secret, expires_at=made.expires_at)


@router.delete("/tokens/{token_id}", status_code=204)
@requires(Permission.OWN)
async def revoke_token(token_id: Annotated[int, Path(ge=1, le=2**63 - 1)], caller: Who) -> None:
    async with caller.changing() as conn:
        await accounts.revoke(conn, credential_id=token_id, actor=caller.actor, account=whose(caller))


async def issue_token(
    caller: Caller, *, name: str, user: str | None, role: Role | None, tags: Collection[str] | None, days: float
) -> Issued:
    principal = caller.principal
    account = user or principal.name
    limits = (role, tags)
    _refuse_own(caller, account)
    if account.lower() != principal.name.lower():
        caller.require(Permission.MANAGE_USERS)
    else:
        least, left = narrowed(principal.role, principal.tags, role, tags)
        limits = (least, None if left is None else sorted(left))
    async with caller.changing() as conn:
        row = await accounts.find_user(conn, account)
        return await accounts.issue(
            conn,
            row,
            kind="token",
            name=name,
            actor=caller.actor,
            seconds=accounts.token_seconds(days),
            limits=limits,
        )


def _refuse_own(caller: Caller, account: str) -> None:
    if account.lower() == caller.principal.name.lower() and not caller.principal.is_session:
        raise Forbidden("A token cannot make another one of its user: sign in with a session for that.")


def whose(caller: Caller) -> str | None:
    return None if caller.principal.may(Permission.MANAGE_USERS) else caller.principal.name


def _user(row: AccountRow) -> User:
    return User(
        name=row.name,
        role=Role(row.role),
        tags=row.tags,
        has_password=row.password_hash is not None,
        is_disabled=row.is_disabled,
        created_by=row.created_by,
        created_at=row.created_at,
        password_changed_at=row.password_changed_at,
    )


def _token(row: CredentialRow) -> Token:
    same = {each.name: getattr(row, each.name) for each in fields(row) if each.name in Token.model_fields}
    return Token(id=row.credential_id, user=row.account, **same)
