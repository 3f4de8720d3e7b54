"""Accounts: people and programs that may use the API, and how they sign in. The audit log records each change.

Secrets are random and shown once; the database stores only their hashes, and no key that could forge one.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING

from psycopg import AsyncConnection

from evertick.db.queries import accounts
from evertick.db.queries.accounts import AccountRow, Credential, NewCredential
from evertick.db.statements import sql_function
from evertick.domain.access import Actor, Principal, Role, check_name, check_password, check_tags, narrowed, network_of
from evertick.domain.errors import Conflict, RateLimited, Unauthenticated, UserError
from evertick.engine.verbs import require, unknown

if TYPE_CHECKING:
    from argon2 import PasswordHasher

# A flood of sign-ins must not exhaust the machine's memory.
_AT_ONCE = threading.BoundedSemaphore(2)


async def hashed(password: str) -> str:
    return await asyncio.to_thread(_hash, password)


async def is_right(password_hash: str | None, password: str) -> bool:
    """False without a hash, after the same time: the response time must not reveal which users exist."""
    return await asyncio.to_thread(_verify, password_hash, password)


def _hash(password: str) -> str:
    with _AT_ONCE:
        return _hasher().hash(password)


def _verify(password_hash: str | None, password: str) -> bool:
    from argon2.exceptions import Argon2Error, InvalidHashError

    with _AT_ONCE:
        try:
            return _hasher().verify(password_hash or _nobodys(), password) and password_hash is not None
        except (Argon2Error, InvalidHashError):
            return False


@cache
def _hasher() -> PasswordHasher:
    """64 MiB, three passes: well above the recommended minimum (19 MiB, two), about a tenth of a second."""
    from argon2 import PasswordHasher

    return PasswordHasher(time_cost=3, memory_cost=64 * 1024, parallelism=1)


@cache
def _nobodys() -> str:
    return _hasher().hash("no account has this password")


SESSION_SECONDS = 12 * 3600.0
CLI_TOKEN_SECONDS = 3600.0


LINK_SECONDS = 3600.0


TOKEN_DAYS, MOST_TOKEN_DAYS = 90.0, 3650.0


# A provider of OpenID Connect is asked again about an account that is used after the first; after the second, no credential of
# the account works until it has answered. A removed group ends access within a minute.
CHECK_AFTER_SECONDS, CHECK_VALID_SECONDS = 40.0, 60.0
# How long one process may ask, before another one may: twice the timeout of a request.
CHECK_HOLD_SECONDS = 20.0


# The number of wrong passwords in a row without a delay; more for an address, because many users may share it.
FREE_FAILURES, FREE_FAILURES_OF_ADDRESS = 5, 50


FIRST_ADMIN = "admin"


_PREFIXES = {"token": "evt_", "session": "evs_", "link": "evl_"}


_LONGEST_SECRET = 200


# Lends a connection for a short time.
Lend = Callable[[], AbstractAsyncContextManager[AsyncConnection]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A new secret, shown only this once."""

    credential_id: int
    secret: str
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Authenticated:
    """A caller with a valid secret, whether to record its use, and how long it is valid; None means no expiry.

    `check_age_seconds`: since the provider of the account was asked; None for an account without a provider.
    """

    principal: Principal
    account_id: int
    is_use_old: bool
    seconds_left: float | None
    check_age_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A name with a password to verify."""

    name: str
    password: str
    actor: Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    """A field that is None stays as it is; `all_tags` removes the limit to some tags."""

    role: str | None = None
    tags: list[str] | None = None
    all_tags: bool = False
    disabled: bool | None = None
    password_hash: str | None = None


@sql_function
async def change_account(conn: AsyncConnection, wanted: AccountChange, *, name: str, actor: Actor) -> str:
    """'changed', 'unknown' or 'last_admin'."""


@sql_function(retries=False)
async def record_login_attempt(
    conn: AsyncConnection, *, subjects: list[str], free: list[int], fading: list[str]
) -> float:
    """Count one more try for each subject, with so many wrong passwords in a row free of delay; returns how many seconds to wait
    first, 0 if none. A fading count decreases only with time, not after a correct password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSignIn:
    """What a provider of OpenID Connect said about a person. `tokens` are encrypted."""

    provider: str
    subject: str
    session_id: str | None
    name: str
    role: str
    tags: list[str] | None
    tokens: str
    key_id: str


@dataclass(frozen=True, slots=True)
class ProviderSignedIn:
    """`outcome`: 'signed_in', 'taken' (an account has that name) or 'disabled'."""

    outcome: str
    account_id: int | None


@dataclass(frozen=True, slots=True)
class ProviderCheck:
    """A claim to ask the provider about an account."""

    provider: str
    subject: str
    tokens: str
    key_id: str
    asked_until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAnswer:
    """`role` None: the provider gives no access any more."""

    role: str | None = None
    tags: list[str] | None = None
    tokens: str | None = None
    key_id: str | None = None


@sql_function
async def sign_in_with_provider(conn: AsyncConnection, given: ProviderSignIn, *, actor: Actor) -> ProviderSignedIn: ...


@sql_function
async def claim_provider_check(
    conn: AsyncConnection, *, account_id: int, after_seconds: float, hold_seconds: float
) -> ProviderCheck | None: ...


@sql_function
async def record_provider_check(
    conn: AsyncConnection, answer: ProviderAnswer, *, account_id: int, asked_until: datetime, actor: Actor
) -> bool: ...


@sql_function
async def end_provider_sessions(
    conn: AsyncConnection, *, provider: str, subject: str | None, session_id: str | None, actor: Actor
) -> int:
    """End the sessions of a person who signed out at the provider. Returns how many."""


async def add_user(
    conn: AsyncConnection,
    *,
    name: str,
    role: Role,
    actor: Actor,
    tags: Collection[str] | None = None,
    password: str | None = None,
) -> None:
    """Without a password the user can sign in only with a token or a one-time link."""
    plain = check_name(name)
    password_hash = None if password is None else await hashed(check_password(password, plain))
    made = await accounts.add_account(
        conn, name=plain, role=role, tags=check_tags(tags), password_hash=password_hash, actor=actor
    )
    if made is None:
        raise Conflict(f"User {plain!r} already exists (names must differ by more than case).")


async def change_user(
    conn: AsyncConnection,
    *,
    name: str,
    actor: Actor,
    role: Role | None = None,
    tags: Collection[str] | None = None,
    all_tags: bool = False,
    disabled: bool | None = None,
) -> None:
    """A field that is None stays as it is. The sessions and tokens of a disabled user end."""
    wanted = AccountChange(role=role, tags=check_tags(tags), all_tags=all_tags, disabled=disabled)
    await _change(conn, name, wanted, actor)


async def set_password(conn: AsyncConnection, *, name: str, password: str, actor: Actor) -> None:
    """Ends every session and token of the user."""
    password_hash = await hashed(check_password(password, name))
    await _change(conn, name, AccountChange(password_hash=password_hash), actor)


async def find_user(conn: AsyncConnection, name: str) -> AccountRow:
    return require(await accounts.find_account(conn, name), "user", repr(name[:40]))


async def sign_in(lend: Lend, proof: Proof, *, means: str, seconds: float = SESSION_SECONDS) -> Issued:
    """A session for a caller with the right password. Each failure in a row makes the next try wait longer."""
    row = await _proved(lend, proof, "The user name or the password is wrong.")
    actor = replace(proof.actor, name=f"user:{row.name}")
    async with lend() as conn:
        return await issue(conn, row, kind="session", name=means, actor=actor, seconds=seconds)


async def change_own_password(lend: Lend, proof: Proof, *, password: str) -> None:
    """For a user who knows the current password, or has none yet. A stolen session is not enough to guess it either."""
    async with lend() as conn:
        row = await find_user(conn, proof.name)
    if row.password_hash is not None:
        await _proved(lend, proof, "The current password is wrong.")
    password_hash = await hashed(check_password(password, proof.name))
    async with lend() as conn:
        await _change(conn, proof.name, AccountChange(password_hash=password_hash), proof.actor)


async def _proved(lend: Lend, proof: Proof, refusal: str) -> AccountRow:
    """The user with that password. No connection is held during the hashing, which is slow on purpose."""
    name, network = proof.name.strip(), network_of(proof.actor.origin or "unknown")
    # Counted per user and network: a stranger cannot make a user wait who signs in from elsewhere.
    user, address = f"user {name.lower()[:100]} from {network}", f"from {network}"
    free = [FREE_FAILURES, FREE_FAILURES_OF_ADDRESS]
    async with lend() as conn:
        wait_seconds = await record_login_attempt(conn, subjects=[user, address], free=free, fading=[address])
        if wait_seconds > 0:
            raise RateLimited(f"Too many failed sign-ins: wait {wait_seconds:.0f} s.", retry_after_seconds=wait_seconds)
        row = await accounts.find_account(conn, name)
    usable = row if row is not None and not row.is_disabled else None
    is_known = await is_right(usable.password_hash if usable else None, proof.password)
    async with lend() as conn:
        if not is_known or usable is None:
            detail: dict[str, object] = {"login": "wrong name or password"}
            actor = replace(proof.actor, name=f"user:{proof.name[:100]}")
            await accounts.note(conn, verb="refuse", actor=actor, detail=detail)
            raise Unauthenticated(refusal)
        await accounts.forgive(conn, subjects=[user], fading=[address])
    return usable


async def sign_in_by_link(conn: AsyncConnection, *, secret: str, actor: Actor) -> Issued:
    row = await accounts.take_link(conn, secret_hash=hash_of(secret), origin=actor.origin)
    if row is None:
        raise Unauthenticated(
            "This sign-in link was already used or has expired. Create another with: evertick users link NAME"
        )
    user = replace(actor, name=f"user:{row.name}")
    return await issue(conn, row, kind="session", name="link", actor=user, seconds=SESSION_SECONDS)


async def issue(
    conn: AsyncConnection,
    row: AccountRow,
    *,
    kind: str,
    name: str,
    actor: Actor,
    seconds: float | None,
    limits: tuple[Role | None, Collection[str] | None] = (None, None),
) -> Issued:
    """A new token, session or link. `limits`: its highest role, and its tags."""
    secret = _PREFIXES[kind] + secrets.token_urlsafe(32)
    role, tags = limits
    new = NewCredential(
        account_id=row.account_id,
        kind=kind,
        name=check_name(name, "token"),
        secret_hash=hash_of(secret),
        actor=actor,
        seconds=seconds,
        role=role,
        tags=check_tags(tags),
    )
    credential_id, expires_at = await accounts.add_credential(conn, new)
    return Issued(credential_id=credential_id, secret=secret, expires_at=expires_at)


def token_seconds(days: float | None) -> float | None:
    """The lifetime in seconds; None for 0 days: it does not expire."""
    if days is not None and not 0 <= days <= MOST_TOKEN_DAYS:
        raise UserError(f"A token is valid for up to {MOST_TOKEN_DAYS:.0f} days; 0 means no expiry.")
    return (TOKEN_DAYS if days is None else days) * 86_400 or None


async def revoke(conn: AsyncConnection, *, credential_id: int, actor: Actor, account: str | None = None) -> None:
    if await accounts.revoke(conn, credential_id=credential_id, actor=actor, account=account) is None:
        raise unknown("token", credential_id)


async def authenticate(conn: AsyncConnection, secret: str) -> Authenticated | None:
    """The owner of a secret; None if it is wrong, revoked or expired."""
    if len(secret) > _LONGEST_SECRET or not secret.startswith(("evt_", "evs_")):
        return None
    known = await accounts.authenticate(conn, hash_of(secret))
    if known is None:
        return None
    return Authenticated(
        principal=_principal(known),
        account_id=known.account_id,
        is_use_old=known.is_use_old,
        seconds_left=known.seconds_left,
        check_age_seconds=known.check_age_seconds,
    )


async def still_valid(conn: AsyncConnection, credential_ids: list[int]) -> list[Principal]:
    """The principals of these credentials that are still valid, with their current rights."""
    found = await accounts.still_valid(conn, credential_ids, valid_seconds=CHECK_VALID_SECONDS)
    return [_principal(known) for known in found]


async def first_admin(conn: AsyncConnection, *, actor: Actor, password: str | None) -> str | None:
    """Create the first admin if there is no account yet. Returns a one-time sign-in secret as long as the admin has no password."""
    known = await accounts.count_accounts(conn)
    if known.accounts == 0:
        await accounts.add_account(conn, name=FIRST_ADMIN, role=Role.ADMIN, tags=None, password_hash=None, actor=actor)
    row = await accounts.find_account(conn, FIRST_ADMIN)
    if row is None or row.password_hash is not None or row.is_disabled:
        return None
    if password is not None:
        await set_password(conn, name=FIRST_ADMIN, password=password, actor=actor)
        return None
    link = await issue(conn, row, kind="link", name="first login", actor=actor, seconds=LINK_SECONDS)
    return link.secret


def _principal(known: Credential) -> Principal:
    cap = None if known.role_cap is None else Role(known.role_cap)
    role, tags = narrowed(Role(known.role), known.tags, cap, known.tag_cap)
    return Principal(
        name=known.name, role=role, tags=tags, credential_id=known.credential_id, is_session=known.kind == "session"
    )


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


async def _change(conn: AsyncConnection, name: str, wanted: AccountChange, actor: Actor) -> None:
    done = await change_account(conn, wanted, name=name, actor=actor)
    if done == "unknown":
        raise unknown("user", repr(name[:40]))
    if done == "last_admin":
        raise Conflict(f"{name!r} is the last admin: create another one first.")
