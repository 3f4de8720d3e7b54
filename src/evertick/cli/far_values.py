"""Variables, connections and secrets of a server. What is secret in them never comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evertick.cli.far import path, record
from evertick.db.queries.secrets import ValueRow
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind

if TYPE_CHECKING:
    from evertick.cli.server import Server


def list_values(server: Server, kind: ValueKind) -> list[ValueRow]:
    return [_value_row(kind, each) for each in server.get(path(f"{kind}s"))["items"]]


def read_value(server: Server, kind: ValueKind, name: str, *, reveal: bool) -> tuple[ValueRow, str | None]:
    """The value as far as it may be shown."""
    if reveal and kind is not ValueKind.VARIABLE:
        raise UserError(
            f"A server does not tell what is secret in a {kind}. Use --reveal where the database and its key are."
        )
    found = server.get(path(f"{kind}s", name))
    return _value_row(kind, found), found["value"]


def put_value(server: Server, kind: ValueKind, name: str, value: str, description: str | None) -> bool:
    return bool(server.put(path(f"{kind}s", name), {"value": value, "description": description})["is_new"])


def delete_value(server: Server, kind: ValueKind, name: str) -> None:
    server.delete(path(f"{kind}s", name))


def _value_row(kind: ValueKind, document: Mapping[str, Any]) -> ValueRow:
    return record(ValueRow, document, kind=kind, content="")
