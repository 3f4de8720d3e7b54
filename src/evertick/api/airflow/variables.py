"""Variables. Values with sensitive names are never shown."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter
from psycopg import AsyncConnection
from pydantic import Field

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
from evertick.api.airflow.masking import HIDDEN, masked_text
from evertick.api.airflow.models import BulkResponse, VariableCollectionResponse, VariableResponse
from evertick.api.desk import Caller, Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import UserError
from evertick.domain.sealing import Keyring
from evertick.domain.stored_values import ValueKind
from evertick.engine import secrets as verbs
from evertick.engine.secrets import About
from evertick.services.keyring import load_keyring
from evertick.store import secrets

router = APIRouter(route_class=GuardedRoute, tags=["Variable"])

KIND = ValueKind.VARIABLE
# Values are encrypted, so sorting by value sorts by name instead. Airflow sorts by ciphertext.
_KEYS = {
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


@router.get("/variables", response_model=VariableCollectionResponse)
@needs(Permission.READ_VALUES)
async def get_variables(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    variable_key_pattern: Pattern = None,
    variable_key_prefix_pattern: Pattern = None,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        rows = await secrets.names(conn, kind=KIND, limit=verbs.MOST_VALUES)
        fitting = [row for row in rows if fits(row.name, variable_key_pattern, variable_key_prefix_pattern)]
        page = ordered(fitting, order_by, _KEYS)[offset : offset + page_size(limit)]
        values = await verbs.read_values(conn, _keyring(caller), [(KIND, row.name) for row in page]) if page else {}
    documents = [
        _document(row.name, values[KIND, row.name], row.description) for row in page if (KIND, row.name) in values
    ]
    return {"variables": documents, "total_entries": len(fitting)}


@router.post("/variables", response_model=VariableResponse, status_code=201)
@needs(Permission.EDIT_VALUES)
async def post_variable(body: VariableBody, caller: Who) -> dict[str, Any]:
    async with caller.changing() as conn:
        await _put(caller, conn, body, is_new=True)
        return await _one(caller, conn, body.key)


@router.patch("/variables", response_model=BulkResponse)
@needs(Permission.EDIT_VALUES)
async def bulk_variables(body: BulkBody[VariableBody], caller: Who) -> dict[str, Any]:
    async with caller.changing() as conn:
        means: Means[VariableBody] = Means(
            name_of=lambda entity: entity.key,
            create=lambda entity, is_new: _put(caller, conn, entity, is_new=is_new),
            update=lambda entity, mask: _patch(caller, conn, entity.key, entity, mask),
            delete=lambda name: verbs.delete_value(conn, kind=KIND, name=name, actor=caller.actor),
        )
        return await carry_out(body, means)


@router.get("/variables/{variable_key:path}", response_model=VariableResponse)
@needs(Permission.READ_VALUES)
async def get_variable(variable_key: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        return await _one(caller, conn, variable_key)


@router.patch("/variables/{variable_key:path}", response_model=VariableResponse)
@needs(Permission.EDIT_VALUES)
async def patch_variable(
    variable_key: str, body: VariableBody, caller: Who, update_mask: Texts = None
) -> dict[str, Any]:
    if body.key != variable_key:
        raise UserError("Invalid body, key from request body doesn't match uri parameter")
    async with caller.changing() as conn:
        await _patch(caller, conn, variable_key, body, update_mask)
        return await _one(caller, conn, variable_key)


@router.delete("/variables/{variable_key:path}", status_code=204)
@needs(Permission.EDIT_VALUES)
async def delete_variable(variable_key: str, caller: Who) -> None:
    async with caller.changing() as conn:
        await verbs.delete_value(conn, kind=KIND, name=variable_key, actor=caller.actor)


async def _put(caller: Caller, conn: AsyncConnection, body: VariableBody, *, is_new: bool) -> None:
    _refuse_team(body.team_name)
    about = About(kind=KIND, name=body.key, description=body.description, is_new=is_new)
    await verbs.put_text(conn, _keyring(caller), about, _text(body.value), actor=caller.actor)


async def _patch(
    caller: Caller, conn: AsyncConnection, key: str, body: VariableBody, update_mask: list[str] | None
) -> None:
    """Update fields in the mask. A masked value that is sent back unchanged keeps the stored value."""
    _refuse_team(body.team_name)
    row, before = await verbs.read_value(conn, _keyring(caller), kind=KIND, name=key)
    is_kept = body.value == HIDDEN or (update_mask and "value" not in update_mask)
    text = before if is_kept else _text(body.value)
    is_told = not update_mask or "description" in update_mask
    about = About(kind=KIND, name=key, description=(body.description or "") if is_told else row.description)
    await verbs.put_text(conn, _keyring(caller), about, text, actor=caller.actor)


async def _one(caller: Caller, conn: AsyncConnection, key: str) -> dict[str, Any]:
    row, value = await verbs.read_value(conn, _keyring(caller), kind=KIND, name=key)
    return _document(key, value, row.description)


def _keyring(caller: Caller) -> Keyring:
    return load_keyring(caller.desk.settings)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refuse_team(team: str | None) -> None:
    if team is not None:
        raise UserError("team_name must be null: Evertick has no teams.")


def _document(key: str, value: str, description: str | None) -> dict[str, Any]:
    return {
        "key": key,
        "value": masked_text(key, value),
        "description": description or None,
        "is_encrypted": True,
    }
