"""Variables, connections and secrets: values that tasks declare by name.

They are stored encrypted, with a key that the database does not have. No operation returns a secret or the password of a
connection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from annotated_doc import Doc
from annotated_types import MaxLen
from psycopg import AsyncConnection

from evertick.db.queries import secrets
from evertick.db.queries.secrets import ValueRow
from evertick.domain.encryption import Keyring
from evertick.domain.errors import InvalidSettings
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind, check_name, read_connection
from evertick.engine import secrets as verbs
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    MOST_ITEMS,
    USUAL_ITEMS,
    Cursor,
    IfMatch,
    Limit,
    Page,
    RequestBody,
    Tagged,
    record_of,
    refuse_stale,
    short_page,
)
from evertick.secrets.keyring import load_keyring

_MOST_VALUES = MOST_ITEMS * 50

ValueName = Annotated[str, MaxLen(200), Doc("The name, as tasks declare it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """`key_id` names the key that the value is encrypted with."""

    name: str
    description: str | None
    key_id: str
    changed_by: str
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValueDetails(StoredValue):
    """`value` of a connection is its address without its secret parts; of a secret it is null."""

    value: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRequest(RequestBody):
    """The value of a connection is an address: `postgresql://anna:PASSWORD@host:5432/shop`."""

    value: Annotated[str, MaxLen(LONGEST_VALUE)]
    description: Annotated[str, MaxLen(1000)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    is_new: bool


async def list_values(
    caller: Caller, *, kind: ValueKind, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[StoredValue]:
    """List stored values by name, without their content."""
    async with caller.read() as conn:
        found = await secrets.list_all(conn, kind=kind, limit=_MOST_VALUES)
    return short_page(found, limit, cursor, lambda row: (row.name,), lambda row: record_of(StoredValue, row))


async def show_value(caller: Caller, *, kind: ValueKind, name: ValueName) -> Tagged[StoredValueDetails]:
    """Show one stored value. Its ETag changes with every change."""
    async with caller.read() as conn:
        row, shown = await read_shown(caller, conn, kind, name)
    return Tagged(record=record_of(StoredValueDetails, row, value=shown), etag=_etag(row))


async def put_value(
    caller: Caller, *, kind: ValueKind, name: ValueName, body: ValueRequest, if_match: IfMatch = None
) -> Tagged[PutResult]:
    """Create a stored value, or replace it."""
    check_name(kind, name)
    async with caller.write() as conn, conn.transaction():
        if if_match is not None:
            refuse_stale(if_match, _etag(await _find(conn, kind, name, is_locked=True)))
        is_new = await verbs.put_value(
            conn,
            keyring_of(caller),
            kind=kind,
            name=name,
            value=body.value,
            actor=caller.actor,
            description=body.description,
        )
        row = await _find(conn, kind, name)
    return Tagged(record=PutResult(is_new=is_new), etag=_etag(row), is_new=is_new)


async def delete_value(caller: Caller, *, kind: ValueKind, name: ValueName, if_match: IfMatch = None) -> None:
    """Delete a stored value. Tasks that declare it fail from then on."""
    async with caller.write() as conn, conn.transaction():
        if if_match is not None:
            refuse_stale(if_match, _etag(await _find(conn, kind, name, is_locked=True)))
        await verbs.delete_value(conn, kind=kind, name=name, actor=caller.actor)


async def read_shown(caller: Caller, conn: AsyncConnection, kind: ValueKind, name: str) -> tuple[ValueRow, str | None]:
    """A value's row, and the text of it that may be shown. A secret is not decrypted."""
    found = await _find(conn, kind, name)
    if kind is ValueKind.SECRET:
        return found, None
    row, value = await read_text(caller, conn, kind, name)
    return row, read_connection(value).shown if kind is ValueKind.CONNECTION else value


async def read_text(caller: Caller, conn: AsyncConnection, kind: ValueKind, name: str) -> tuple[ValueRow, str]:
    """A value's row and its decrypted text. An unknown name is reported even where the server has no key."""
    await _find(conn, kind, name)
    return await verbs.read_value(conn, keyring_of(caller), kind=kind, name=name)


def keyring_of(caller: Caller) -> Keyring:
    try:
        return load_keyring(caller.context.settings)
    except InvalidSettings as error:
        raise caller.context.misconfigured(
            error, "This server has no key for stored values. Run `evertick doctor` on it to see the reason."
        ) from None


async def _find(conn: AsyncConnection, kind: ValueKind, name: str, *, is_locked: bool = False) -> ValueRow:
    found = await (secrets.lock if is_locked else secrets.find)(conn, kinds=[kind], names=[name])
    if not found:
        raise await verbs.missing_value(conn, kind, name)
    return found[0]


def _etag(row: ValueRow) -> str:
    return f'"{hashlib.sha256(row.content.encode()).hexdigest()[:32]}"'
