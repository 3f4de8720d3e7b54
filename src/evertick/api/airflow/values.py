"""Variables and connections in Airflow's format.

Values whose names indicate a secret are masked; a masked value that comes back changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any

from psycopg import AsyncConnection
from pydantic import ConfigDict, Field

from evertick.api.airflow import models, query
from evertick.api.airflow.resources import Resource, routes_of
from evertick.api.context import ApiCaller, Who
from evertick.db.queries import secrets
from evertick.db.queries.secrets import NamedValue, ValueRow
from evertick.domain.access import Permission
from evertick.domain.dags.params import JsonValue
from evertick.domain.errors import UserError
from evertick.domain.stored_values import Connection, ValueKind, read_connection, read_extra
from evertick.engine import secrets as verbs
from evertick.engine.secrets import About
from evertick.operations.values import keyring_of, read_text

HIDDEN = "***"
MOST_DEPTH = 20


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


VARIABLE = ValueKind.VARIABLE


# Values are encrypted, so sorting by value sorts by name instead. Airflow sorts by ciphertext.
_VARIABLE_KEYS = {
    **dict.fromkeys(("key", "id", "_val"), "name"),
    "description": "description",
    "is_encrypted": None,
    "team_name": None,
}


class VariableBody(query.Body):
    key: Annotated[str, Field(max_length=250)]
    value: Any
    description: Annotated[str | None, Field(max_length=2000)] = None
    team_name: Annotated[str | None, Field(max_length=50)] = None


async def _variables_page(
    caller: ApiCaller, conn: AsyncConnection, rows: list[NamedValue], order_by: list[str] | None, part: slice
) -> list[dict[str, Any]]:
    page = query.ordered(rows, order_by, _VARIABLE_KEYS)[part]
    values = await verbs.read_values(conn, keyring_of(caller), [(VARIABLE, row.name) for row in page]) if page else {}
    return [
        _variable_document(row.name, values[VARIABLE, row.name], row.description)
        for row in page
        if (VARIABLE, row.name) in values
    ]


async def _delete(kind: ValueKind, caller: ApiCaller, conn: AsyncConnection, name: str) -> None:
    await verbs.delete_value(conn, kind=kind, name=name, actor=caller.actor)


async def _put_variable(caller: ApiCaller, conn: AsyncConnection, body: VariableBody, is_new: bool) -> None:
    query.refuse_team(body.team_name)
    about = About(kind=VARIABLE, name=body.key, description=body.description, is_new=is_new)
    await verbs.put(conn, keyring_of(caller), about, _text(body.value), actor=caller.actor)


async def _patch_variable(
    caller: ApiCaller, conn: AsyncConnection, key: str, body: VariableBody, update_mask: list[str] | None
) -> None:
    """Update fields in the mask. A masked value that is sent back unchanged keeps the stored value."""
    if body.key != key:
        raise UserError("Invalid body, key from request body doesn't match uri parameter")
    query.refuse_team(body.team_name)
    row, before = await read_text(caller, conn, VARIABLE, key)
    is_kept = body.value == HIDDEN or (update_mask and "value" not in update_mask)
    text = before if is_kept else _text(body.value)
    about = _about(VARIABLE, row, body, update_mask)
    await verbs.put(conn, keyring_of(caller), about, text, actor=caller.actor)


def _about(kind: ValueKind, row: ValueRow, body: VariableBody | ConnectionBody, update_mask: list[str] | None) -> About:
    is_told = not update_mask or "description" in update_mask
    return About(kind=kind, name=row.name, description=(body.description or "") if is_told else row.description)


async def _one_variable(caller: ApiCaller, conn: AsyncConnection, key: str) -> dict[str, Any]:
    row, value = await read_text(caller, conn, VARIABLE, key)
    return _variable_document(key, value, row.description)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _variable_document(key: str, value: str, description: str | None) -> dict[str, Any]:
    return {"key": key, "value": masked_text(key, value), "description": description or None, "is_encrypted": True}


variables_router = routes_of(
    Resource(
        name="variable",
        parameter="variable_key",
        path="/variables/{variable_key:path}",
        entity=VariableBody,
        change=VariableBody,
        response=models.VariableResponse,
        collection=models.VariableCollectionResponse,
        reading=Permission.READ_VALUES,
        editing=Permission.EDIT_VALUES,
        rows=partial(secrets.names, kind=VARIABLE, limit=verbs.MOST_VALUES),
        page=_variables_page,
        find=_one_variable,
        name_of=lambda entity: entity.key,
        create=_put_variable,
        update=_patch_variable,
        delete=partial(_delete, VARIABLE),
    )
)


CONNECTION = ValueKind.CONNECTION


_CONNECTION_KEYS = {
    **dict.fromkeys(("conn_id", "connection_id", "id"), "connection_id"),
    **{name: name for name in ("conn_type", "description", "host", "port")},
    "team_name": None,
}


# Sort keys that do not need decrypted values.
_BY_NAME = {"conn_id", "connection_id", "id", "description", "team_name"}


class ConnectionBody(query.Body):
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


async def _connections_page(
    caller: ApiCaller, conn: AsyncConnection, rows: list[NamedValue], order_by: list[str] | None, part: slice
) -> list[dict[str, Any]]:
    stubs = [_stub(row.name, row.description) for row in rows]
    if {each.removeprefix("-") for each in order_by or ()} <= _BY_NAME:
        return await _opened(caller, conn, query.ordered(stubs, order_by, _CONNECTION_KEYS)[part])
    # Sorting by an encrypted field needs all connections decrypted.
    return query.ordered(await _opened(caller, conn, stubs), order_by, _CONNECTION_KEYS)[part]


async def _put_connection(caller: ApiCaller, conn: AsyncConnection, body: ConnectionBody, is_new: bool) -> None:
    about = About(kind=CONNECTION, name=body.connection_id, description=body.description, is_new=is_new)
    made = _connection(body)
    await verbs.put(conn, keyring_of(caller), about, made, extra=_extra(body), actor=caller.actor)


async def _patch_connection(
    caller: ApiCaller, conn: AsyncConnection, name: str, body: ConnectionBody, update_mask: list[str] | None
) -> None:
    """Update fields in the mask. A masked value that is sent back unchanged keeps the stored value."""
    if body.connection_id != name:
        raise UserError("The connection_id in the request body does not match the URL parameter")
    row, text = await read_text(caller, conn, CONNECTION, name)
    before, after = read_connection(text), _connection(body)
    ours = {"conn_type": "type", "schema": "schema", **{e: e for e in ("host", "port", "login", "password")}}
    kept = {ours[each] for each in ours if update_mask and each not in update_mask}
    if body.password == HIDDEN:
        kept.add("password")
    after = replace(after, **{each: getattr(before, each) for each in kept})
    extra = read_extra(text)
    if not update_mask or "extra" in update_mask:
        extra = {name: _unmasked(each, extra.get(name)) for name, each in _extra(body).items()}
    about = _about(CONNECTION, row, body, update_mask)
    await verbs.put(conn, keyring_of(caller), about, after, extra=extra, actor=caller.actor)


async def _one_connection(caller: ApiCaller, conn: AsyncConnection, name: str) -> dict[str, Any]:
    row, text = await read_text(caller, conn, CONNECTION, name)
    return _connection_document(_stub(name, row.description), text)


async def _opened(caller: ApiCaller, conn: AsyncConnection, stubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for first in range(0, len(stubs), 500):
        part = stubs[first : first + 500]
        wanted = [(str(CONNECTION), stub["connection_id"]) for stub in part]
        texts = await verbs.read_values(conn, keyring_of(caller), wanted)
        for stub, key in zip(part, wanted, strict=True):
            if key in texts:
                found.append(_connection_document(stub, texts[key]))
        await asyncio.sleep(0)
    return found


def _connection(body: ConnectionBody) -> Connection:
    query.refuse_team(body.team_name)
    return Connection(
        type=body.conn_type,
        host=body.host or "",
        port=body.port,
        login=body.login or "",
        password=body.password or "",
        schema=body.var_schema or "",
    )


def _extra(body: ConnectionBody) -> dict[str, JsonValue]:
    try:
        extra = json.loads(body.extra) if body.extra else {}
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict) or _is_deep(extra):
        raise UserError(f"extra must be a string that contains a JSON object, nested at most {MOST_DEPTH} deep.")
    return extra


def _is_deep(value: JsonValue) -> bool:
    """Whether it is nested too deeply to be masked by recursion."""
    level = [value]
    for _ in range(MOST_DEPTH):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _unmasked(value: JsonValue, before: JsonValue) -> JsonValue:
    """The value with the stored ones in place of those that come back masked."""
    if value == HIDDEN and before is not None:
        return before
    if isinstance(value, dict) and isinstance(before, dict):
        return {key: _unmasked(each, before.get(key)) for key, each in value.items()}
    if isinstance(value, list) and isinstance(before, list):
        return [_unmasked(each, old) for each, old in zip_longest(value, before[: len(value)])]
    return value


def _stub(name: str, description: str | None) -> dict[str, Any]:
    return {"connection_id": name, "description": description or None}


def _connection_document(stub: dict[str, Any], text: str) -> dict[str, Any]:
    connection, extra = read_connection(text), _masked(read_extra(text))
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


connections_router = routes_of(
    Resource(
        name="connection",
        parameter="connection_id",
        path="/connections/{connection_id}",
        entity=ConnectionBody,
        change=ConnectionBody,
        response=models.ConnectionResponse,
        collection=models.ConnectionCollectionResponse,
        reading=Permission.READ_VALUES,
        editing=Permission.EDIT_VALUES,
        rows=partial(secrets.names, kind=CONNECTION, limit=verbs.MOST_VALUES),
        page=_connections_page,
        find=_one_connection,
        name_of=lambda entity: entity.connection_id,
        create=_put_connection,
        update=_patch_connection,
        delete=partial(_delete, CONNECTION),
    )
)


@connections_router.post("/connections/test", Permission.EDIT_VALUES, models.ConnectionTestResponse)
async def test_connection(body: ConnectionBody, caller: Who) -> dict[str, Any]:
    """Disabled, as in Airflow by default: a server that connects to any requested host is a security risk."""
    _connection(body)
    return {
        "status": False,
        "message": "Testing connections is disabled. Test the connection on a machine that runs tasks.",
    }


@connections_router.post("/connections/defaults", Permission.EDIT_VALUES, status_code=204)
async def create_default_connections(caller: Who) -> None:
    """Does nothing: Evertick has no default connections."""
