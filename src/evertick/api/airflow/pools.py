"""Pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.bulk import BulkBody, Means, carry_out
from evertick.api.airflow.models import BulkResponse, PoolCollectionResponse, PoolResponse
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
from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.db.queries.gates import GateRow
from evertick.domain.access import Permission
from evertick.domain.dags.gates import MOST_SLOTS
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine import gates as verbs

router = APIRouter(route_class=GuardedRoute, tags=["Pool"])

# In Airflow, -1 means unlimited.
ENDLESS = -1
Slots = Annotated[int, Field(ge=ENDLESS, le=MOST_SLOTS)]
Description = Annotated[str | None, Field(max_length=2000)]
_KEYS = {
    "id": lambda row: row.gate_id,
    "name": lambda row: row.name,
    "pool": lambda row: row.name,
    "slots": lambda row: row.capacity,
}


class PoolBody(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    slots: Slots
    description: Description = None
    include_deferred: bool = False
    team_name: Annotated[str | None, Field(max_length=50)] = None


class PoolPatch(Body):
    pool: str | None = None
    slots: Slots | None = None
    description: Description = None
    include_deferred: bool | None = None
    team_name: Annotated[str | None, Field(max_length=50)] = None


@router.get("/pools", response_model=PoolCollectionResponse)
@requires(Permission.READ_GATES)
async def get_pools(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    pool_name_pattern: Pattern = None,
    pool_name_prefix_pattern: Pattern = None,
) -> dict[str, Any]:
    async with caller.read() as conn:
        rows = await gates.list_gates(conn, kinds=["pool"])
        rows = [row for row in rows if fits(row.name, pool_name_pattern, pool_name_prefix_pattern)]
        page = ordered(rows, order_by, _KEYS)[offset : offset + page_size(limit)]
        return {"pools": await _documents(conn, page), "total_entries": len(rows)}


@router.post("/pools", response_model=PoolResponse, status_code=201)
@requires(Permission.EDIT_POOLS)
async def post_pool(body: PoolBody, caller: Who) -> dict[str, Any]:
    async with caller.write(Channel.TASKS) as conn:
        await _create(caller, conn, body, is_new=True)
        return await _one(conn, body.name)


@router.patch("/pools", response_model=BulkResponse)
@requires(Permission.EDIT_POOLS)
async def bulk_pools(body: BulkBody[PoolBody], caller: Who) -> dict[str, Any]:
    async with caller.write(Channel.TASKS) as conn:

        async def update(entity: PoolBody, mask: list[str] | None) -> None:
            fields = entity.model_fields_set - {"name"}
            await _change(caller, conn, entity.name, PoolPatch.model_validate(entity.model_dump(include=fields)), mask)

        means: Means[PoolBody] = Means(
            name_of=lambda entity: entity.name,
            create=lambda entity, is_new: _create(caller, conn, entity, is_new=is_new),
            update=update,
            delete=lambda name: verbs.delete_pool(conn, name=name, actor=caller.actor),
        )
        return await carry_out(body, means)


@router.get("/pools/{pool_name:path}", response_model=PoolResponse)
@requires(Permission.READ_GATES)
async def get_pool(pool_name: str, caller: Who) -> dict[str, Any]:
    async with caller.read() as conn:
        return await _one(conn, pool_name)


@router.patch("/pools/{pool_name:path}", response_model=PoolResponse)
@requires(Permission.EDIT_POOLS)
async def patch_pool(pool_name: str, body: PoolPatch, caller: Who, update_mask: Texts = None) -> dict[str, Any]:
    async with caller.write(Channel.TASKS) as conn:
        await _change(caller, conn, pool_name, body, update_mask)
        return await _one(conn, pool_name)


@router.delete("/pools/{pool_name:path}", status_code=204)
@requires(Permission.EDIT_POOLS)
async def delete_pool(pool_name: str, caller: Who) -> None:
    async with caller.write() as conn:
        await verbs.delete_pool(conn, name=pool_name, actor=caller.actor)


async def _create(caller: ApiCaller, conn: AsyncConnection, body: PoolBody, *, is_new: bool) -> None:
    _refuse(body.team_name, body.include_deferred)
    if is_new and any(row.name == body.name for row in await gates.list_gates(conn, kinds=["pool"])):
        raise Conflict(f"Pool with name: `{body.name}` already exists")
    await verbs.set_pool(conn, name=body.name, slots=_slots(body.slots), actor=caller.actor)
    if body.description is not None:
        await gates.describe_pool(conn, name=body.name, description=body.description)


async def _change(
    caller: ApiCaller, conn: AsyncConnection, name: str, patch: PoolPatch, update_mask: list[str] | None
) -> None:
    # As in Airflow, the body must be complete; fields outside the mask are ignored.
    fields = patch.model_fields_set if not update_mask else patch.model_fields_set.intersection(update_mask)
    if "pool" in fields and patch.pool not in (None, name):
        raise UserError("A pool cannot be renamed. Create a new one.")
    _refuse(
        patch.team_name if "team_name" in fields else None,
        patch.include_deferred if "include_deferred" in fields else None,
    )
    await _find(conn, name)
    if "slots" in fields and patch.slots is not None:
        await verbs.set_pool(conn, name=name, slots=_slots(patch.slots), actor=caller.actor)
    if "description" in fields:
        await gates.describe_pool(conn, name=name, description=patch.description or "")


def _refuse(team: str | None, include_deferred: bool | None) -> None:
    if team is not None:
        raise UserError("team_name must be null: Evertick has no teams.")
    if include_deferred:
        raise UserError("include_deferred must be false: a deferred task holds no slots in Evertick.")


def _slots(given: int) -> int:
    return MOST_SLOTS if given == ENDLESS else given


async def _find(conn: AsyncConnection, name: str) -> GateRow:
    for row in await gates.list_gates(conn, kinds=["pool"]):
        if row.name == name:
            return row
    raise NotFound(f"The Pool with name: `{name}` was not found")


async def _one(conn: AsyncConnection, name: str) -> dict[str, Any]:
    return (await _documents(conn, [await _find(conn, name)]))[0]


async def _documents(conn: AsyncConnection, rows: Sequence[GateRow]) -> list[dict[str, Any]]:
    texts = await gates.pool_descriptions(conn, [row.name for row in rows])
    return [await _document(conn, row, texts.get(row.name)) for row in rows]


async def _document(conn: AsyncConnection, row: GateRow, description: str | None) -> dict[str, Any]:
    held = await gates.holders(conn, row.gate_id)
    running = sum(each.weight for each in held if each.state == "running")
    waiting = sum(each.weight for each in await gates.waiters(conn, row.gate_id))
    return {
        "name": row.name,
        "slots": ENDLESS if row.capacity == MOST_SLOTS else row.capacity,
        "description": description or None,
        "include_deferred": False,
        "occupied_slots": row.used,
        "running_slots": running,
        "queued_slots": row.used - running,
        "scheduled_slots": waiting,
        "open_slots": row.capacity - row.used,
        "deferred_slots": 0,
    }
