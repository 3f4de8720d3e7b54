"""Variables, connections and secrets: what tasks declare. A secret can be set and never be read; of a connection its password
neither. What is stored is sealed with a key that the database does not have.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Caller, Who
from evertick.api.paging import MOST_ITEMS, IfMatch, Page, put_etag, refuse_stale
from evertick.db.queries import secrets
from evertick.db.queries.secrets import ValueRow
from evertick.domain.access import Permission
from evertick.domain.encryption import Keyring
from evertick.domain.errors import Conflict, InvalidSettings, NotFound
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind, check_name, read_connection
from evertick.engine import secrets as verbs
from evertick.secrets.keyring import load_keyring

Name = Annotated[str, Path(max_length=200)]


class StoredValue(BaseModel):
    """`key_id` names the key that it is sealed with."""

    name: str
    description: str | None
    key_id: str
    changed_by: str
    changed_at: datetime


class ReadValue(StoredValue):
    """`value` of a connection is its address without what is secret in it; of a secret it is null."""

    value: str | None


class NewValue(BaseModel):
    """Of a connection the value is an address: `postgresql://anna:PASSWORD@host:5432/shop`."""

    model_config = ConfigDict(extra="forbid")
    value: Annotated[str, Field(max_length=LONGEST_VALUE)]
    description: Annotated[str, Field(max_length=1000)] | None = None


class Put(BaseModel):
    is_new: bool


def values_router(kind: ValueKind) -> APIRouter:
    """The four routes that each kind has; what differs is what may be shown."""
    router = APIRouter(prefix=f"/{kind}s", route_class=GuardedRoute, tags=["values"])

    @router.get("", name=f"list_{kind}s")
    @requires(Permission.READ_VALUES)
    async def list_values(caller: Who) -> Page[StoredValue]:
        """By name, never with their values."""
        async with caller.reading() as conn:
            found = await secrets.list_all(conn, kind=kind, limit=MOST_ITEMS * 50)
        return Page(items=[StoredValue(**_facts(row)) for row in found], next_cursor=None)

    @router.get("/{name}", name=f"show_{kind}")
    @requires(Permission.READ_VALUES)
    async def show_value(name: Name, response: Response, caller: Who) -> ReadValue:
        """Its ETag changes with every change."""
        async with caller.reading() as conn:
            row = await _find(conn, kind, name)
            shown = None if kind is ValueKind.SECRET else await _shown(caller, conn, kind, name)
        put_etag(response, _etag(row))
        return ReadValue(**_facts(row), value=shown)

    @router.put("/{name}", name=f"put_{kind}")
    @requires(Permission.EDIT_VALUES)
    async def put_value(name: Name, wanted: NewValue, response: Response, caller: Who, if_match: IfMatch = None) -> Put:
        """Make it, or give it another value."""
        check_name(kind, name)
        async with caller.changing() as conn, conn.transaction():
            if if_match is not None:
                refuse_stale(if_match, _etag(await _find(conn, kind, name, is_locked=True)))
            is_new = await verbs.put_value(
                conn,
                _keyring(caller),
                kind=kind,
                name=name,
                value=wanted.value,
                actor=caller.actor,
                description=wanted.description,
            )
            row = await _find(conn, kind, name)
        put_etag(response, _etag(row))
        return Put(is_new=is_new)

    @router.delete("/{name}", status_code=204, name=f"delete_{kind}")
    @requires(Permission.EDIT_VALUES)
    async def delete_value(name: Name, caller: Who) -> None:
        """Tasks that declare it fail from then on."""
        async with caller.changing() as conn:
            await verbs.delete_value(conn, kind=kind, name=name, actor=caller.actor)

    return router


def _facts(row: ValueRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in StoredValue.model_fields}


async def _shown(caller: Caller, conn: AsyncConnection, kind: ValueKind, name: str) -> str:
    _, value = await verbs.read_value(conn, _keyring(caller), kind=kind, name=name)
    return read_connection(value).shown if kind is ValueKind.CONNECTION else value


async def _find(conn: AsyncConnection, kind: ValueKind, name: str, *, is_locked: bool = False) -> ValueRow:
    found = await (secrets.lock if is_locked else secrets.find)(conn, [(kind, name)])
    if not found:
        raise NotFound(f"There is no {kind} {name[:200]!r}.")
    return found[0]


def _keyring(caller: Caller) -> Keyring:
    """Where the key is, or why it cannot be read, is nobody's business out there: the log has it."""
    try:
        return load_keyring(caller.desk.settings)
    except InvalidSettings as error:
        caller.desk.log.error("no_secret_key", error=error)
        raise Conflict("This server has no key for stored values: `evertick doctor` there says why.") from None


def _etag(row: ValueRow) -> str:
    return f'"{hashlib.sha256(row.content.encode()).hexdigest()[:32]}"'
