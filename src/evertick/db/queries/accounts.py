"""Accounts, their credentials, failed logins, and the audit log.

Sees only hashes of secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb
from psycopg.types.range import Range

from evertick.db.queries.run_lists import PageRequest, RunFilter, dags_of, numbers_of, read_page
from evertick.db.statements import query, sql
from evertick.domain.access import Actor

NEWEST = 2**63 - 1


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
class NewCredential:
    """`seconds` None: it does not expire. `role` and `tags` narrow the rights of the account."""

    account_id: int
    kind: str
    name: str
    secret_hash: bytes
    actor: Actor
    seconds: float | None
    role: str | None = None
    tags: list[str] | None = None


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
    # Since the provider of OpenID Connect was asked about the account; None: the account has none.
    check_age_seconds: float | None


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


@dataclass(frozen=True, slots=True)
class AccessFacts:
    local_admins: int
    endless_tokens: int
    unused_tokens: int
    admin_tokens: int


@dataclass(frozen=True, slots=True)
class AuditEntry:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    verb: str | None = None
    actor: str | None = None
    dag: str | None = None
    run_id: int | None = None
    since: datetime | None = None


@query
async def add_account(
    conn: AsyncConnection, *, name: str, role: str, tags: list[str] | None, password_hash: str | None, actor: Actor
) -> int | None: ...


@query
async def find_account(conn: AsyncConnection, name: str) -> AccountRow | None: ...


@query
async def find_account_by_id(conn: AsyncConnection, *, account_id: int) -> AccountRow: ...


@query
async def list_accounts(conn: AsyncConnection, *, after: str = "", limit: int = 1000) -> list[AccountRow]: ...


@query
async def count_accounts(conn: AsyncConnection) -> Accounts: ...


@query
async def forgive(conn: AsyncConnection, *, subjects: list[str], fading: list[str]) -> None:
    """Reset the counts after a correct password."""


@query
async def add_credential(conn: AsyncConnection, new: NewCredential) -> tuple[int, datetime | None]:
    """Its id, and when it expires."""


@query
async def take_link(conn: AsyncConnection, *, secret_hash: bytes, origin: str | None) -> AccountRow | None: ...


@query
async def authenticate(conn: AsyncConnection, secret_hash: bytes) -> Credential | None: ...


@query
async def still_valid(
    conn: AsyncConnection, credential_ids: list[int], *, valid_seconds: float
) -> list[Credential]: ...


@query
async def use_once(conn: AsyncConnection, *, key: bytes, seconds: float) -> bool | None:
    """True: the first use. None: it was used before."""


@query
async def access_facts(conn: AsyncConnection, *, unused_days: int) -> AccessFacts: ...


@query
async def note_use(conn: AsyncConnection, *, credential_id: int, origin: str) -> None: ...


@query
async def list_credentials(
    conn: AsyncConnection, *, account: str | None = None, after: int = 0, limit: int = 1000
) -> list[CredentialRow]: ...


@query
async def revoke(conn: AsyncConnection, *, credential_id: int, actor: Actor, account: str | None = None) -> str | None:
    """The name of its account; None if there is no such credential."""


@query
async def note(
    conn: AsyncConnection,
    *,
    verb: str,
    actor: Actor,
    detail: dict[str, object],
    dag_id: int | None = None,
    run_id: int | None = None,
) -> None: ...


@query
async def audit(
    conn: AsyncConnection, wanted: AuditFilter, *, before: int = NEWEST, floor: int = 0, limit: int = 100
) -> list[AuditEntry]:
    """Newest first: entries before one entry, and none before `floor`."""


@query
async def audit_floor(conn: AsyncConnection, *, before: int, window: int) -> tuple[int, bool] | None:
    """The lower end of a window of the journal, and whether older entries exist."""


async def audit_page(
    conn: AsyncConnection, wanted: AuditFilter, *, before: int, limit: int, window: int
) -> tuple[list[AuditEntry], int | None]:
    """The matching entries of one window, and where to continue; None at the end. A rare filter must not read the whole journal.
    The entries of one run have a separate index."""
    floor, has_more = 0, False
    if wanted.run_id is None:
        floor, has_more = await audit_floor(conn, before=before, window=window) or (0, False)
    found = await audit(conn, wanted, before=before, floor=floor, limit=limit)
    if len(found) == limit:
        return found, found[-1].entry_id
    return found, floor if has_more else None


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
    """A filter that is None does not apply. `names`: of verbs that have another name here. Filters and orders are by name."""

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
    names: Mapping[str, str] = field(default_factory=dict)


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
    params = {**asdict(wanted), "dag_ids": dag_ids, "run_ids": run_ids, "names": Jsonb(wanted.names)}
    never_null = frozenset({"entry_id", "occurred_at"})
    return await read_page(
        conn, sql("accounts", "list"), params, asked, ListedEvent, never_null=never_null, is_small=False
    )
