"""Users and tokens of a server, and its audit log, as the records that commands show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evertick.cli.far import path, record
from evertick.db.queries.accounts import AccountRow, AuditFilter, AuditRow, CredentialRow
from evertick.engine.accounts import Issued

if TYPE_CHECKING:
    from evertick.cli.server import Server

# In place of a hash, which stays at the server: only whether there is one is shown.
_HAS_PASSWORD = "at the server"


def list_users(server: Server, limit: int) -> list[AccountRow]:
    return [_account_row(each) for each in server.pages(path("users"), limit=limit)]


def find_user(server: Server, name: str) -> AccountRow:
    return _account_row(server.get(path("users", name)))


def add_user(server: Server, user: Mapping[str, object]) -> None:
    server.post(path("users"), dict(user))


def change_user(server: Server, name: str, wanted: Mapping[str, object]) -> None:
    server.patch(path("users", name), dict(wanted))


def make_link(server: Server, name: str) -> str:
    """The path to sign in with."""
    return str(server.post(path("users", name, "link"))["path"])


def list_tokens(server: Server, user: str | None, limit: int) -> list[CredentialRow]:
    return [
        record(CredentialRow, each, credential_id=each["id"], account=each["user"], revoked_at=None)
        for each in server.pages(path("tokens"), limit=limit, user=user)
    ]


def make_token(server: Server, wanted: Mapping[str, object]) -> Issued:
    made = server.post(path("tokens"), {name: value for name, value in wanted.items() if value is not None})
    return record(Issued, made, credential_id=made["id"], secret=made["token"])


def revoke_token(server: Server, number: int) -> None:
    server.delete(path("tokens", number))


def list_audit(server: Server, wanted: AuditFilter, limit: int) -> list[AuditRow]:
    found = server.pages(
        path("audit"), limit=limit, verb=wanted.verb, actor=wanted.actor, dag=wanted.dag, run_id=wanted.run_id
    )
    return [record(AuditRow, each) for each in found]


def _account_row(document: Mapping[str, Any]) -> AccountRow:
    return record(AccountRow, document, account_id=0, password_hash=_HAS_PASSWORD if document["has_password"] else None)
