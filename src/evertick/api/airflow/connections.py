"""Connections. Passwords and extra fields are never shown."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from psycopg import AsyncConnection
from pydantic import ConfigDict, Field

from evertick.api.airflow.asking import (
    USUAL_ITEMS,
    Body,
    Limit,
    Offset,
    OrderBy,
    Pattern,
    Texts,
    fits,
    ordered,
    page_size,
)
from evertick.api.airflow.bulk import BulkBody, Means, carry_out
from evertick.api.airflow.masking import HIDDEN
from evertick.api.airflow.models import (
    BulkResponse,
    ConnectionCollectionResponse,
    ConnectionResponse,
    ConnectionTestResponse,
)
from evertick.api.desk import Caller, Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import UserError
from evertick.domain.sealing import Keyring
from evertick.domain.stored_values import Connection, ValueKind, read_connection
from evertick.engine import secrets as verbs
from evertick.engine.secrets import About
from evertick.services.keyring import load_keyring
from evertick.store import secrets

router = APIRouter(route_class=GuardedRoute, tags=["Connection"])

KIND = ValueKind.CONNECTION
_KEYS = {
    "conn_id": lambda item: item["connection_id"],
    "connection_id": lambda item: item["connection_id"],
    "id": lambda item: item["connection_id"],
    "conn_type": lambda item: item["conn_type"],
    "description": lambda item: item["description"],
    "host": lambda item: item["host"],
    "port": lambda item: item["port"],
    "team_name": lambda item: None,
}
# Sort keys that do not need decrypted values.
_BY_NAME = {"conn_id", "connection_id", "id", "description", "team_name"}


class ConnectionBody(Body):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    connection_id: Annotated[str, Field(max_length=200)]
    conn_type: Annotated[str, Field(min_length=1, max_length=500)]
    description: Annotated[str | None, Field(max_length=2000)] = None
    host: Annotated[str | None, Field(max_length=2000)] = None
    login: Annotated[str | None, Field(max_length=2000)] = None
    password: Annotated[str | None, Field(max_length=20_000)] = None
    port: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    var_schema: Annotated[str | None, Field(max_length=2000, alias="schema")] = None
    extra: Annotated[str | None, Field(max_length=60_000)] = None
    team_name: Annotated[str | None, Field(max_length=50)] = None


@router.get("/connections", response_model=ConnectionCollectionResponse)
@needs(Permission.READ_VALUES)
async def get_connections(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    connection_id_pattern: Pattern = None,
    connection_id_prefix_pattern: Pattern = None,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        rows = await secrets.names(conn, kind=KIND, limit=verbs.MOST_VALUES)
        fitting = [row for row in rows if fits(row.name, connection_id_pattern, connection_id_prefix_pattern)]
        known = {each.removeprefix("-") for each in order_by or ()}
        stubs = [_stub(row.name, row.description) for row in fitting]
        if known <= _BY_NAME:
            page = ordered(stubs, order_by, _KEYS)[offset : offset + page_size(limit)]
            found = await _opened(caller, conn, page)
        else:
            # Sorting by an encrypted field needs all connections decrypted.
            page = ordered(await _opened(caller, conn, stubs), order_by, _KEYS)
            found = page[offset : offset + page_size(limit)]
    return {"connections": found, "total_entries": len(fitting)}


@router.post("/connections", response_model=ConnectionResponse, status_code=201)
@needs(Permission.EDIT_VALUES)
async def post_connection(body: ConnectionBody, caller: Who) -> dict[str, Any]:
    async with caller.changing() as conn:
        await _put(caller, conn, body, is_new=True)
        return await _one(caller, conn, body.connection_id)


@router.patch("/connections", response_model=BulkResponse)
@needs(Permission.EDIT_VALUES)
async def bulk_connections(body: BulkBody[ConnectionBody], caller: Who) -> dict[str, Any]:
    async with caller.changing() as conn:
        means: Means[ConnectionBody] = Means(
            name_of=lambda entity: entity.connection_id,
            create=lambda entity, is_new: _put(caller, conn, entity, is_new=is_new),
            update=lambda entity, mask: _patch(caller, conn, entity, mask),
            delete=lambda name: verbs.delete_value(conn, kind=KIND, name=name, actor=caller.actor),
        )
        return await carry_out(body, means)


@router.post("/connections/test", response_model=ConnectionTestResponse)
@needs(Permission.EDIT_VALUES)
async def test_connection(body: ConnectionBody, caller: Who) -> dict[str, Any]:
    """Disabled, as in Airflow by default: a server that connects to any requested host is a security risk."""
    _connection(body)
    return {
        "status": False,
        "message": "Testing connections is disabled. Test the connection on a machine that runs tasks.",
    }


@router.post("/connections/defaults", status_code=204)
@needs(Permission.EDIT_VALUES)
async def create_default_connections(caller: Who) -> None:
    """Does nothing: Evertick has no default connections."""


@router.get("/connections/{connection_id}", response_model=ConnectionResponse)
@needs(Permission.READ_VALUES)
async def get_connection(connection_id: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        return await _one(caller, conn, connection_id)


@router.patch("/connections/{connection_id}", response_model=ConnectionResponse)
@needs(Permission.EDIT_VALUES)
async def patch_connection(
    connection_id: str, body: ConnectionBody, caller: Who, update_mask: Texts = None
) -> dict[str, Any]:
    if body.connection_id != connection_id:
        raise UserError("The connection_id in the request body does not match the URL parameter")
    async with caller.changing() as conn:
        await _patch(caller, conn, body, update_mask)
        return await _one(caller, conn, connection_id)


@router.delete("/connections/{connection_id}", status_code=204)
@needs(Permission.EDIT_VALUES)
async def delete_connection(connection_id: str, caller: Who) -> None:
    async with caller.changing() as conn:
        await verbs.delete_value(conn, kind=KIND, name=connection_id, actor=caller.actor)


async def _put(caller: Caller, conn: AsyncConnection, body: ConnectionBody, *, is_new: bool) -> None:
    about = About(kind=KIND, name=body.connection_id, description=body.description, is_new=is_new)
    await verbs.put_connection(conn, _keyring(caller), about, _connection(body), actor=caller.actor)


async def _patch(caller: Caller, conn: AsyncConnection, body: ConnectionBody, update_mask: list[str] | None) -> None:
    """Update fields in the mask. A masked value that is sent back unchanged keeps the stored value."""
    row, text = await verbs.read_value(conn, _keyring(caller), kind=KIND, name=body.connection_id)
    before, after = read_connection(text), _connection(body)
    ours = {"conn_type": "type", "schema": "schema", **{e: e for e in ("host", "port", "login", "password", "extra")}}
    kept = {ours[each] for each in ours if update_mask and each not in update_mask}
    if body.password == HIDDEN:
        kept.add("password")
    after = replace(after, extra={k: before.extra.get(k, v) if v == HIDDEN else v for k, v in after.extra.items()})
    after = replace(after, **{each: getattr(before, each) for each in kept})
    is_told = not update_mask or "description" in update_mask
    description = (body.description or "") if is_told else row.description
    about = About(kind=KIND, name=body.connection_id, description=description)
    await verbs.put_connection(conn, _keyring(caller), about, after, actor=caller.actor)


async def _one(caller: Caller, conn: AsyncConnection, name: str) -> dict[str, Any]:
    row, text = await verbs.read_value(conn, _keyring(caller), kind=KIND, name=name)
    return _document(_stub(name, row.description), read_connection(text))


async def _opened(caller: Caller, conn: AsyncConnection, stubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for first in range(0, len(stubs), 500):
        part = stubs[first : first + 500]
        wanted = [(str(KIND), stub["connection_id"]) for stub in part]
        texts = await verbs.read_values(conn, _keyring(caller), wanted)
        for stub, key in zip(part, wanted, strict=True):
            if key in texts:
                found.append(_document(stub, read_connection(texts[key])))
        await asyncio.sleep(0)
    return found


def _connection(body: ConnectionBody) -> Connection:
    if body.team_name is not None:
        raise UserError("team_name must be null: Evertick has no teams.")
    try:
        extra = json.loads(body.extra) if body.extra else {}
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise UserError("extra must be a string that contains a JSON object.")
    return Connection(
        type=body.conn_type,
        host=body.host or "",
        port=body.port,
        login=body.login or "",
        password=body.password or "",
        schema=body.var_schema or "",
        extra={key: value if isinstance(value, str) else json.dumps(value) for key, value in extra.items()},
    )


def _keyring(caller: Caller) -> Keyring:
    return load_keyring(caller.desk.settings)


def _stub(name: str, description: str | None) -> dict[str, Any]:
    return {"connection_id": name, "description": description or None}


def _document(stub: dict[str, Any], connection: Connection) -> dict[str, Any]:
    extra = dict.fromkeys(connection.extra, HIDDEN)
    return {
        **stub,
        "conn_type": connection.type,
        "host": connection.host or None,
        "login": connection.login or None,
        "password": HIDDEN if connection.password else None,
        "port": connection.port,
        "schema": connection.schema or None,
        "extra": json.dumps(extra) if extra else None,
    }
