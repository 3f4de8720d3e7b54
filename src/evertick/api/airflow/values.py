"""Variables and connections in Airflow's format.

Values whose names indicate a secret are masked; a masked value that comes back changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from psycopg import AsyncConnection
from pydantic import ConfigDict, Field

from evertick.api.airflow.bulk import BulkBody, Means, carry_out
from evertick.api.airflow.models import (
    BulkResponse,
    ConnectionCollectionResponse,
    ConnectionResponse,
    ConnectionTestResponse,
    VariableCollectionResponse,
    VariableResponse,
)
from evertick.api.airflow.query import (
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
from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import secrets
from evertick.domain.access import Permission
from evertick.domain.encryption import Keyring
from evertick.domain.errors import UserError
from evertick.domain.stored_values import Connection, ValueKind, read_connection
from evertick.engine import secrets as verbs
from evertick.engine.secrets import About
from evertick.secrets.keyring import load_keyring

HIDDEN = "***"


# As in Airflow: a name that contains one of these is sensitive.
SENSITIVE = (
    "access_token",
    "api_key",
    "apikey",
    "authorization",
    "keyfile_dict",
    "passphrase",
    "passwd",
    "password",
    "private_key",
    "secret",
    "service_account",
    "token",
)


def is_sensitive(name: str) -> bool:
    plain = name.strip().lower()
    return any(word in plain for word in SENSITIVE)


def masked_text(name: str, text: str) -> str:
    """Mask a variable's value completely, or the sensitive fields of a JSON value."""
    if is_sensitive(name):
        return HIDDEN
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(found, dict | list):
        return text
    masked = _masked(found)
    return text if masked == found else json.dumps(masked)


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: HIDDEN if is_sensitive(str(key)) and each else _masked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return value


variables_router = APIRouter(route_class=GuardedRoute, tags=["Variable"])


VARIABLE = ValueKind.VARIABLE


# Values are encrypted, so sorting by value sorts by name instead. Airflow sorts by ciphertext.
_VARIABLE_KEYS = {
    "key": lambda row: row.name,
    "id": lambda row: row.name,
    "_val": lambda row: row.name,
    "description": lambda row: row.description,
    "is_encrypted": lambda row: True,
    "team_name": lambda row: None,
}


class VariableBody(Body):
    key: Annotated[str, Field(max_length=250)]
    value: Any
    description: Annotated[str | None, Field(max_length=2000)] = None
    team_name: Annotated[str | None, Field(max_length=50)] = None


@variables_router.get("/variables", response_model=VariableCollectionResponse)
@requires(Permission.READ_VALUES)
async def get_variables(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    variable_key_pattern: Pattern = None,
    variable_key_prefix_pattern: Pattern = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await secrets.names(conn, kind=VARIABLE, limit=verbs.MOST_VALUES)
        fitting = [row for row in rows if fits(row.name, variable_key_pattern, variable_key_prefix_pattern)]
        page = ordered(fitting, order_by, _VARIABLE_KEYS)[offset : offset + page_size(limit)]
        values = await verbs.read_values(conn, _keyring(caller), [(VARIABLE, row.name) for row in page]) if page else {}
    documents = [
        _variable_document(row.name, values[VARIABLE, row.name], row.description)
        for row in page
        if (VARIABLE, row.name) in values
    ]
    return {"variables": documents, "total_entries": len(fitting)}


@variables_router.post("/variables", response_model=VariableResponse, status_code=201)
@requires(Permission.EDIT_VALUES)
async def post_variable(body: VariableBody, caller: Who) -> dict[str, Any]:
    async with caller.write() as conn:
        await _put_variable(caller, conn, body, is_new=True)
        return await _one_variable(caller, conn, body.key)


@variables_router.patch("/variables", response_model=BulkResponse)
@requires(Permission.EDIT_VALUES)
async def bulk_variables(body: BulkBody[VariableBody], caller: Who) -> dict[str, Any]:
    async with caller.write() as conn:
        means: Means[VariableBody] = Means(
            name_of=lambda entity: entity.key,
            create=lambda entity, is_new: _put_variable(caller, conn, entity, is_new=is_new),
            update=lambda entity, mask: _patch_variable(caller, conn, entity.key, entity, mask),
            delete=lambda name: verbs.delete_value(conn, kind=VARIABLE, name=name, actor=caller.actor),
        )
        return await carry_out(body, means)


@variables_router.get("/variables/{variable_key:path}", response_model=VariableResponse)
@requires(Permission.READ_VALUES)
async def get_variable(variable_key: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return await _one_variable(caller, conn, variable_key)


@variables_router.patch("/variables/{variable_key:path}", response_model=VariableResponse)
@requires(Permission.EDIT_VALUES)
async def patch_variable(
    variable_key: str, body: VariableBody, caller: Who, update_mask: Texts = None
) -> dict[str, Any]:
    if body.key != variable_key:
        raise UserError("Invalid body, key from request body doesn't match uri parameter")
    async with caller.write() as conn:
        await _patch_variable(caller, conn, variable_key, body, update_mask)
        return await _one_variable(caller, conn, variable_key)


@variables_router.delete("/variables/{variable_key:path}", status_code=204)
@requires(Permission.EDIT_VALUES)
async def delete_variable(variable_key: str, caller: Who) -> None:
    async with caller.write() as conn:
        await verbs.delete_value(conn, kind=VARIABLE, name=variable_key, actor=caller.actor)


async def _put_variable(caller: ApiCaller, conn: AsyncConnection, body: VariableBody, *, is_new: bool) -> None:
    _refuse_team(body.team_name)
    about = About(kind=VARIABLE, name=body.key, description=body.description, is_new=is_new)
    await verbs.put_text(conn, _keyring(caller), about, _text(body.value), actor=caller.actor)


async def _patch_variable(
    caller: ApiCaller, conn: AsyncConnection, key: str, body: VariableBody, update_mask: list[str] | None
) -> None:
    """Update fields in the mask. A masked value that is sent back unchanged keeps the stored value."""
    _refuse_team(body.team_name)
    row, before = await verbs.read_value(conn, _keyring(caller), kind=VARIABLE, name=key)
    is_kept = body.value == HIDDEN or (update_mask and "value" not in update_mask)
    text = before if is_kept else _text(body.value)
    is_told = not update_mask or "description" in update_mask
    about = About(kind=VARIABLE, name=key, description=(body.description or "") if is_told else row.description)
    await verbs.put_text(conn, _keyring(caller), about, text, actor=caller.actor)


async def _one_variable(caller: ApiCaller, conn: AsyncConnection, key: str) -> dict[str, Any]:
    row, value = await verbs.read_value(conn, _keyring(caller), kind=VARIABLE, name=key)
    return _variable_document(key, value, row.description)


def _keyring(caller: ApiCaller) -> Keyring:
    return load_keyring(caller.desk.settings)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refuse_team(team: str | None) -> None:
    if team is not None:
        raise UserError("team_name must be null: Evertick has no teams.")


def _variable_document(key: str, value: str, description: str | None) -> dict[str, Any]:
    return {
        "key": key,
        "value": masked_text(key, value),
        "description": description or None,
        "is_encrypted": True,
    }


connections_router = APIRouter(route_class=GuardedRoute, tags=["Connection"])


CONNECTION = ValueKind.CONNECTION


_CONNECTION_KEYS = {
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


@connections_router.get("/connections", response_model=ConnectionCollectionResponse)
@requires(Permission.READ_VALUES)
async def get_connections(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    connection_id_pattern: Pattern = None,
    connection_id_prefix_pattern: Pattern = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await secrets.names(conn, kind=CONNECTION, limit=verbs.MOST_VALUES)
        fitting = [row for row in rows if fits(row.name, connection_id_pattern, connection_id_prefix_pattern)]
        known = {each.removeprefix("-") for each in order_by or ()}
        stubs = [_stub(row.name, row.description) for row in fitting]
        if known <= _BY_NAME:
            page = ordered(stubs, order_by, _CONNECTION_KEYS)[offset : offset + page_size(limit)]
            found = await _opened(caller, conn, page)
        else:
            # Sorting by an encrypted field needs all connections decrypted.
            page = ordered(await _opened(caller, conn, stubs), order_by, _CONNECTION_KEYS)
            found = page[offset : offset + page_size(limit)]
    return {"connections": found, "total_entries": len(fitting)}


@connections_router.post("/connections", response_model=ConnectionResponse, status_code=201)
@requires(Permission.EDIT_VALUES)
async def post_connection(body: ConnectionBody, caller: Who) -> dict[str, Any]:
    async with caller.write() as conn:
        await _put_connection(caller, conn, body, is_new=True)
        return await _one_connection(caller, conn, body.connection_id)


@connections_router.patch("/connections", response_model=BulkResponse)
@requires(Permission.EDIT_VALUES)
async def bulk_connections(body: BulkBody[ConnectionBody], caller: Who) -> dict[str, Any]:
    async with caller.write() as conn:
        means: Means[ConnectionBody] = Means(
            name_of=lambda entity: entity.connection_id,
            create=lambda entity, is_new: _put_connection(caller, conn, entity, is_new=is_new),
            update=lambda entity, mask: _patch_connection(caller, conn, entity, mask),
            delete=lambda name: verbs.delete_value(conn, kind=CONNECTION, name=name, actor=caller.actor),
        )
        return await carry_out(body, means)


@connections_router.post("/connections/test", response_model=ConnectionTestResponse)
@requires(Permission.EDIT_VALUES)
async def test_connection(body: ConnectionBody, caller: Who) -> dict[str, Any]:
    """Disabled, as in Airflow by default: a server that connects to any requested host is a security risk."""
    _connection(body)
    return {
        "status": False,
        "message": "Testing connections is disabled. Test the connection on a machine that runs tasks.",
    }


@connections_router.post("/connections/defaults", status_code=204)
@requires(Permission.EDIT_VALUES)
async def create_default_connections(caller: Who) -> None:
    """Does nothing: Evertick has no default connections."""


@connections_router.get("/connections/{connection_id}", response_model=ConnectionResponse)
@requires(Permission.READ_VALUES)
async def get_connection(connection_id: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return await _one_connection(caller, conn, connection_id)


@connections_router.patch("/connections/{connection_id}", response_model=ConnectionResponse)
@requires(Permission.EDIT_VALUES)
async def patch_connection(
    connection_id: str, body: ConnectionBody, caller: Who, update_mask: Texts = None
) -> dict[str, Any]:
    if body.connection_id != connection_id:
        raise UserError("The connection_id in the request body does not match the URL parameter")
    async with caller.write() as conn:
        await _patch_connection(caller, conn, body, update_mask)
        return await _one_connection(caller, conn, connection_id)


@connections_router.delete("/connections/{connection_id}", status_code=204)
@requires(Permission.EDIT_VALUES)
async def delete_connection(connection_id: str, caller: Who) -> None:
    async with caller.write() as conn:
        await verbs.delete_value(conn, kind=CONNECTION, name=connection_id, actor=caller.actor)


async def _put_connection(caller: ApiCaller, conn: AsyncConnection, body: ConnectionBody, *, is_new: bool) -> None:
    about = About(kind=CONNECTION, name=body.connection_id, description=body.description, is_new=is_new)
    await verbs.put_connection(conn, _keyring(caller), about, _connection(body), actor=caller.actor)


async def _patch_connection(
    caller: ApiCaller, conn: AsyncConnection, body: ConnectionBody, update_mask: list[str] | None
) -> None:
    """Update fields in the mask. A masked value that is sent back unchanged keeps the stored value."""
    row, text = await verbs.read_value(conn, _keyring(caller), kind=CONNECTION, name=body.connection_id)
    before, after = read_connection(text), _connection(body)
    ours = {"conn_type": "type", "schema": "schema", **{e: e for e in ("host", "port", "login", "password", "extra")}}
    kept = {ours[each] for each in ours if update_mask and each not in update_mask}
    if body.password == HIDDEN:
        kept.add("password")
    after = replace(after, extra={k: before.extra.get(k, v) if v == HIDDEN else v for k, v in after.extra.items()})
    after = replace(after, **{each: getattr(before, each) for each in kept})
    is_told = not update_mask or "description" in update_mask
    description = (body.description or "") if is_told else row.description
    about = About(kind=CONNECTION, name=body.connection_id, description=description)
    await verbs.put_connection(conn, _keyring(caller), about, after, actor=caller.actor)


async def _one_connection(caller: ApiCaller, conn: AsyncConnection, name: str) -> dict[str, Any]:
    row, text = await verbs.read_value(conn, _keyring(caller), kind=CONNECTION, name=name)
    return _connection_document(_stub(name, row.description), read_connection(text))


async def _opened(caller: ApiCaller, conn: AsyncConnection, stubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for first in range(0, len(stubs), 500):
        part = stubs[first : first + 500]
        wanted = [(str(CONNECTION), stub["connection_id"]) for stub in part]
        texts = await verbs.read_values(conn, _keyring(caller), wanted)
        for stub, key in zip(part, wanted, strict=True):
            if key in texts:
                found.append(_connection_document(stub, read_connection(texts[key])))
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


def _stub(name: str, description: str | None) -> dict[str, Any]:
    return {"connection_id": name, "description": description or None}


def _connection_document(stub: dict[str, Any], connection: Connection) -> dict[str, Any]:
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
