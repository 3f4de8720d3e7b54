"""Accounts, their credentials, failed logins, and the audit log.

Sees only hashes of secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.db.connection import has_own_session
from evertick.db.queries.run_lists import PageRequest, RunFilter, dags_of, numbers_of, read_page
from evertick.db.statements import all_rows, one_row, one_value, sql

NEWEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class LoginAttempt:
    """The subject whose wrong passwords are counted, and how many in a row are free of delay. A fading count decreases only with
    time, not after a correct password."""

    subject: str
    free: int
    is_fading: bool = False


@dataclass(frozen=True, slots=True)
class AccountRow:
    account_id: int
    name: str
    role: str
    tags: list[str] | None
    password_hash: str | None
    is_disabled: bool
    created_by: str
    created_at: datetime
    password_changed_at: datetime | None


@dataclass(frozen=True, slots=True)
class Accounts:
    accounts: int
    with_password: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange:
    """A field that is None stays as it is; `all_tags` removes the limit to some tags."""

    role: str | None = None
    tags: list[str] | None = None
    all_tags: bool = False
    disabled: bool | None = None
    password_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCredential:
    """`seconds` None: it does not expire. `role` and `tags` narrow the rights of the account."""

    account_id: int
    kind: str
    name: str
    secret_hash: bytes
    actor: str
    seconds: float | None
    role: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True, slots=True)
class CreatedCredential:
    credential_id: int
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Credential:
    """The account that a secret belongs to."""

    credential_id: int
    kind: str
    credential: str
    role_cap: str | None
    tag_cap: list[str] | None
    account_id: int
    name: str
    role: str
    tags: list[str] | None
    is_use_old: bool
    # None: it does not expire.
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class CredentialRow:
    credential_id: int
    account: str
    kind: str
    name: str
    role: str | None
    tags: list[str] | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None
    used_from: str | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class AuditRow:
    entry_id: int
    occurred_at: datetime
    verb: str
    actor: str
    origin: str | None
    request_id: str | None
    dag: str | None
    run_id: int | None
    task: str | None
    map_index: int | None
    detail: dict[str, object]


@dataclass(frozen=True, slots=True)
class AuditCursor:
    """The lower end of a window of the journal, and whether older entries exist."""

    entry_id: int
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    verb: str | None = None
    actor: str | None = None
    dag: str | None = None
    run_id: int | None = None
    since: datetime | None = None


async def add_account(
    conn: AsyncConnection, *, name: str, role: str, tags: list[str] | None, password_hash: str | None, actor: str
) -> int | None:
    params = {"name": name, "role": role, "tags": tags, "password_hash": password_hash, "actor": actor}
    return cast("int | None", await one_value(conn, sql("accounts", "add_account"), params))


async def change_account(conn: AsyncConnection, *, name: str, wanted: AccountChange, actor: str) -> str:
    """'changed', 'unknown' or 'last_admin'."""
    params = {"name": name, "actor": actor, **asdict(wanted)}
    return cast(str, await one_value(conn, sql("accounts", "change_account"), params))


async def find_account(conn: AsyncConnection, name: str) -> AccountRow | None:
    return await one_row(conn, sql("accounts", "find_account"), {"name": name}, AccountRow)


async def list_accounts(conn: AsyncConnection, *, after: str = "", limit: int = 1000) -> list[AccountRow]:
    return await all_rows(conn, sql("accounts", "list_accounts"), {"after": after, "limit": limit}, AccountRow)


async def count_accounts(conn: AsyncConnection) -> Accounts:
    return cast(Accounts, await one_row(conn, sql("accounts", "count_accounts"), {}, Accounts))


async def record_login_attempt(conn: AsyncConnection, tried: Sequence[LoginAttempt]) -> float:
    """Count one more try for each subject; returns how many seconds to wait first, 0 if none."""
    params = {"subjects": [each.subject for each in tried], "free": [each.free for each in tried]}
    params["fading"] = [each.subject for each in tried if each.is_fading]
    return cast(float, await one_value(conn, sql("accounts", "try_login"), params))


async def forgive(conn: AsyncConnection, tried: Sequence[LoginAttempt]) -> None:
    """Reset the counts after a correct password."""
    params = {"subjects": [each.subject for each in tried if not each.is_fading]}
    params["fading"] = [each.subject for each in tried if each.is_fading]
    await conn.execute(sql("accounts", "forgive"), params)


async def add_credential(conn: AsyncConnection, new: NewCredential) -> CreatedCredential:
    return cast(
        CreatedCredential, await one_row(conn, sql("accounts", "add_credential"), asdict(new), CreatedCredential)
    )


async def take_link(conn: AsyncConnection, *, secret_hash: bytes, origin: str) -> AccountRow | None:
    params = {"secret_hash": secret_hash, "origin": origin}
    return await one_row(conn, sql("accounts", "take_link"), params, AccountRow)


async def authenticate(conn: AsyncConnection, secret_hash: bytes) -> Credential | None:
    return await one_row(conn, sql("accounts", "authenticate"), {"secret_hash": secret_hash}, Credential)


async def still_valid(conn: AsyncConnection, credential_ids: list[int]) -> list[Credential]:
    return await all_rows(conn, sql("accounts", "still_valid"), {"credential_ids": credential_ids}, Credential)


async def note_use(conn: AsyncConnection, *, credential_id: int, origin: str) -> None:
    await conn.execute(sql("accounts", "note_use"), {"credential_id": credential_id, "origin": origin})


async def list_credentials(
    conn: AsyncConnection, *, account: str | None = None, after: int = 0, limit: int = 1000
) -> list[CredentialRow]:
    params = {"account": account, "after": after, "limit": limit}
    return await all_rows(conn, sql("accounts", "list_credentials"), params, CredentialRow)


async def revoke(conn: AsyncConnection, *, credential_id: int, actor: str, account: str | None = None) -> str | None:
    """The name of its account; None if there is no such credential."""
    params = {"credential_id": credential_id, "actor": actor, "account": account}
    return cast("str | None", await one_value(conn, sql("accounts", "revoke"), params))


async def note(
    conn: AsyncConnection,
    *,
    verb: str,
    actor: str,
    detail: dict[str, object],
    dag_id: int | None = None,
    run_id: int | None = None,
) -> None:
    params = {"verb": verb, "actor": actor, "dag_id": dag_id, "run_id": run_id, "detail": Jsonb(detail)}
    await conn.execute(sql("accounts", "note"), params)


async def audit(
    conn: AsyncConnection, wanted: AuditFilter, *, before: int = NEWEST, floor: int = 0, limit: int = 100
) -> list[AuditRow]:
    """Newest first: entries before one entry, and none before `floor`."""
    params = {**asdict(wanted), "before": before, "floor": floor, "limit": limit}
    return await all_rows(conn, sql("accounts", "audit"), params, AuditRow)


async def audit_page(
    conn: AsyncConnection, wanted: AuditFilter, *, before: int, limit: int, window: int
) -> tuple[list[AuditRow], int | None]:
    """The matching entries of one window, and where to continue; None at the end. A rare filter must not read the whole journal.
    The entries of one run have a separate index."""
    floor = AuditCursor(0, False)
    if wanted.run_id is None:
        params = {"before": before, "window": window}
        floor = await one_row(conn, sql("accounts", "audit_floor"), params, AuditCursor) or floor
    found = await audit(conn, wanted, before=before, floor=floor.entry_id, limit=limit)
    if len(found) == limit:
        return found, found[-1].entry_id
    return found, floor.entry_id if floor.has_more else None


async def set_origin(conn: AsyncConnection, *, origin: str, request_id: str) -> None:
    """Behind a pooler another client may use the session next: its entries then have no origin rather than a wrong one."""
    if has_own_session(conn):
        await conn.execute(sql("accounts", "say_origin"), {"origin": origin, "request_id": request_id})


@dataclass(frozen=True, slots=True)
class ListedEvent:
    entry_id: int
    occurred_at: datetime
    verb: str
    actor: str
    dag: str | None
    text_id: str | None
    fire_at: datetime | None
    task: str | None
    map_index: int | None
    detail: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """A filter that is None does not apply."""

    entry_id: int | None = None
    dag: str | None = None
    task: str | None = None
    text_id: str | None = None
    map_index: int | None = None
    actor: str | None = None
    verb: str | None = None
    verbs: list[str] | None = None
    without: list[str] | None = None
    occurred: Range[datetime] | None = None
    dag_like: list[str] | None = None
    dag_heads: list[str] | None = None
    task_like: list[str] | None = None
    task_heads: list[str] | None = None
    run_like: list[str] | None = None
    run_heads: list[str] | None = None
    actor_like: list[str] | None = None
    actor_heads: list[str] | None = None
    verb_like: list[str] | None = None
    verb_heads: list[str] | None = None


async def list_events(conn: AsyncConnection, wanted: EventFilter, asked: PageRequest) -> tuple[list[ListedEvent], int]:
    """Oldest first by default. DAGs and runs are filtered by their ids, which entries store: names would have to be looked up
    for each entry."""
    named = None if wanted.dag is None else [wanted.dag]
    among = RunFilter(dags=named, dag_like=wanted.dag_like, dag_heads=wanted.dag_heads)
    is_of_dags = any(each is not None for each in (wanted.dag, wanted.dag_like, wanted.dag_heads))
    dag_ids = await dags_of(conn, asdict(among)) if is_of_dags else None
    run_ids = None if wanted.text_id is None else await numbers_of(conn, [wanted.text_id], asdict(among))
    if [] in (dag_ids, run_ids):
        return [], 0
    params = {**asdict(wanted), "dag_ids": dag_ids, "run_ids": run_ids}
    never_null = frozenset({"entry_id", "occurred_at"})
    return await read_page(
        conn, sql("accounts", "list"), params, asked, ListedEvent, never_null=never_null, is_small=False
    )
