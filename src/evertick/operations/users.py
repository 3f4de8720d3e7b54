"""Users, tokens and the audit log. A secret is returned once, when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen

from evertick.db.queries import accounts as accounts_queries
from evertick.db.queries.accounts import AccountRow, AuditEntry, AuditFilter, CredentialRow
from evertick.domain.access import LONGEST_NAME, LONGEST_PASSWORD, MOST_TAGS, Permission, Role, narrowed
from evertick.domain.errors import Forbidden
from evertick.engine import accounts
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    LARGEST,
    USUAL_ITEMS,
    Cursor,
    Limit,
    Page,
    RequestBody,
    encode_cursor,
    page_of,
    read_cursor,
    record_of,
)

# The number of entries that one page of the audit log searches: 5 ms.
AUDIT_WINDOW = 5000

UserName = Annotated[str, MaxLen(LONGEST_NAME), Doc("The user's name.")]
Tags = Annotated[Sequence[Annotated[str, MinLen(1), MaxLen(LONGEST_NAME)]], MinLen(1), MaxLen(MOST_TAGS)]
NewName = Annotated[str, MinLen(1), MaxLen(LONGEST_NAME)]
Password = Annotated[str, MinLen(1), MaxLen(LONGEST_PASSWORD)]
TokenId = Annotated[int, Ge(1), Le(LARGEST), Doc("The token's number.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    name: str
    role: Role
    tags: list[str] | None
    has_password: bool
    is_disabled: bool
    created_by: str
    created_at: datetime
    password_changed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUser(RequestBody):
    """A user without a password can only use tokens and sign-in links."""

    name: NewName
    role: Role = Role.VIEWER
    tags: Tags | None = None
    password: Password | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChange(RequestBody):
    """Fields that are left out keep their values. `all_dags` removes the limit to tags."""

    role: Role | None = None
    tags: Tags | None = None
    all_dags: bool = False
    is_disabled: bool | None = None
    password: Password | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInLink:
    """A path under the server's address that signs the user in once."""

    path: str
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    token_id: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken(RequestBody):
    """`role` and `tags` can only reduce the rights of the user. Without `user` the token is the caller's own."""

    name: NewName
    user: NewName | None = None
    role: Role | None = None
    tags: Tags | None = None
    days: Annotated[float, Ge(0), Le(accounts.MOST_TOKEN_DAYS)] = accounts.TOKEN_DAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedToken:
    """`token` is shown only this once."""

    token_id: int
    token: str
    expires_at: datetime | None


async def list_users(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[User]:
    """List users by name."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        found = await accounts_queries.list_accounts(conn, after=after, limit=limit)
    return page_of(found, limit, lambda row: (row.name,), _user)


async def add_user(caller: Caller, *, body: NewUser) -> User:
    """Add a user."""
    async with caller.write() as conn:
        await accounts.add_user(
            conn, name=body.name, role=body.role, tags=body.tags, password=body.password, actor=caller.actor
        )
        return _user(await accounts.find_user(conn, body.name.strip()))


async def show_user(caller: Caller, *, name: UserName) -> User:
    """Show one user."""
    async with caller.read() as conn:
        return _user(await accounts.find_user(conn, name))


async def change_user(caller: Caller, *, name: UserName, body: UserChange) -> User:
    """Change a user. A new password, or disabling the user, ends all their sessions and tokens. A caller changes the own
    password with PUT /auth/password, which needs the current one."""
    if body.password is not None and _is_own(caller, name):
        raise Forbidden("Your own password needs the current one. Change it with PUT /auth/password and a session.")
    async with caller.write() as conn:
        # A new password alone is one entry in the audit log.
        if body.password is None or replace(body, password=None) != UserChange():
            await accounts.change_user(
                conn,
                name=name,
                role=body.role,
                tags=body.tags,
                all_tags=body.all_dags,
                disabled=body.is_disabled,
                actor=caller.actor,
            )
        if body.password is not None:
            await accounts.set_password(conn, name=name, password=body.password, actor=caller.actor)
        return _user(await accounts.find_user(conn, name))


async def make_link(caller: Caller, *, name: UserName) -> SignInLink:
    """Make a link that signs a user in once, within the hour. A token cannot make one for its own user: the session would
    have more rights than the token."""
    _refuse_own(caller, name)
    async with caller.write() as conn:
        row = await accounts.find_user(conn, name)
        made = await accounts.issue(
            conn, row, kind="link", name="link", actor=caller.actor, seconds=accounts.LINK_SECONDS
        )
    return SignInLink(path=f"/auth/link/{made.secret}", expires_at=made.expires_at)


async def list_tokens(
    caller: Caller,
    *,
    user: Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only of this user.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Token]:
    """List valid tokens and sessions: the caller's own, or for a caller who manages users those of all users."""
    (after,) = read_cursor(cursor, 0)
    if user is not None and not _is_own(caller, user):
        caller.require(Permission.MANAGE_USERS)
    async with caller.read() as conn:
        if user is not None:
            await accounts.find_user(conn, user)
        account = user if user is not None else _visible_account(caller)
        found = await accounts_queries.list_credentials(conn, account=account, after=after, limit=limit)
    return page_of(found, limit, lambda row: (row.credential_id,), _token)


async def make_token(caller: Caller, *, body: NewToken) -> CreatedToken:
    """Make a token: the caller's own, or for a caller who manages users one of any user. It never has more rights than the
    caller."""
    principal = caller.principal
    account = body.user or principal.name
    limits = (body.role, body.tags)
    _refuse_own(caller, account)
    if not _is_own(caller, account):
        caller.require(Permission.MANAGE_USERS)
    else:
        least, left = narrowed(principal.role, principal.tags, body.role, body.tags)
        limits = (least, None if left is None else sorted(left))
    seconds = accounts.token_seconds(body.days)
    async with caller.write() as conn:
        row = await accounts.find_user(conn, account)
        made = await accounts.issue(
            conn, row, kind="token", name=body.name, actor=caller.actor, seconds=seconds, limits=limits
        )
    return CreatedToken(token_id=made.credential_id, token=made.secret, expires_at=made.expires_at)


async def revoke_token(caller: Caller, *, token_id: TokenId) -> None:
    """Revoke a token or end a session."""
    async with caller.write() as conn:
        await accounts.revoke(conn, credential_id=token_id, actor=caller.actor, account=_visible_account(caller))


async def list_audit(
    caller: Caller,
    *,
    verb: Annotated[str | None, MaxLen(300), Doc("Only this action.")] = None,
    actor: Annotated[str | None, MaxLen(300), Doc("Only by this actor, as `user:ann`.")] = None,
    dag: Annotated[str | None, MaxLen(300), Doc("Only about this DAG.")] = None,
    run_id: Annotated[int | None, Ge(1), Le(LARGEST), Doc("Only about this run.")] = None,
    since: Annotated[datetime | None, Doc("Only from this time on.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[AuditEntry]:
    """List the audit log, newest first: each change with its actor, origin, and the values before and after, and each
    refusal. With a filter a page may be short and still have a successor."""
    (before,) = read_cursor(cursor, LARGEST)
    wanted = AuditFilter(verb=verb, actor=actor, dag=dag, run_id=run_id, since=since)
    async with caller.read() as conn:
        found, end = await accounts_queries.audit_page(
            conn, wanted, before=before, limit=limit, window=max(AUDIT_WINDOW, limit)
        )
    return Page(items=found, next_cursor=None if end is None else encode_cursor(end))


def _is_own(caller: Caller, account: str) -> bool:
    """Whether the caller signed in as this user. A caller with access to the database did not sign in."""
    principal = caller.principal
    return principal.credential_id is not None and account.lower() == principal.name.lower()


def _refuse_own(caller: Caller, account: str) -> None:
    if _is_own(caller, account) and not caller.principal.is_session:
        raise Forbidden("A token cannot make another token or link of its user. Sign in with a session for that.")


def _visible_account(caller: Caller) -> str | None:
    """The user whose tokens the caller may see and revoke; None for all users."""
    return None if caller.principal.may(Permission.MANAGE_USERS) else caller.principal.name


def _user(row: AccountRow) -> User:
    return record_of(User, row, role=Role(row.role), has_password=row.password_hash is not None)


def _token(row: CredentialRow) -> Token:
    role = None if row.role is None else Role(row.role)
    return record_of(Token, row, token_id=row.credential_id, user=row.account, role=role)
