"""Pools."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow.words import USUAL_ITEMS, Body, Limit, Offset, OrderBy, Texts, fits, ordered, page_size
from evertick.api.desk import Who
from evertick.api.guard import GuardedRoute, needs
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.gates import MOST_SLOTS
from evertick.engine import gates as verbs
from evertick.store import gates
from evertick.store.gates import GateRow
from evertick.store.wake import Channel

router = APIRouter(route_class=GuardedRoute, tags=["Pool"])

Slots = Annotated[int, Field(ge=0, le=MOST_SLOTS)]
_KEYS = {
    "id": lambda item: item["name"],
    "name": lambda item: item["name"],
    "pool": lambda item: item["name"],
    "slots": lambda item: item["slots"],
}


class PoolBody(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    slots: Slots
    description: str | None = None
    include_deferred: bool = False
    team_name: str | None = None


class PoolPatch(Body):
    pool: str | None = None
    slots: Slots | None = None
    description: str | None = None
    include_deferred: bool | None = None
    team_name: str | None = None


@router.get("/pools")
@needs(Permission.READ_GATES)
async def get_pools(
    caller: Who,
    limit: Limit = USUAL_ITEMS,
    offset: Offset = 0,
    order_by: OrderBy = None,
    pool_name_pattern: str | None = None,
    pool_name_prefix_pattern: str | None = None,
) -> dict[str, Any]:
    async with caller.reading() as conn:
        rows = await gates.list_gates(conn, kinds=["pool"])
        rows = [row for row in rows if fits(row.name, pool_name_pattern, pool_name_prefix_pattern)]
        documents = [await _document(conn, row) for row in rows]
    found = ordered(documents, order_by, _KEYS)
    return {"pools": found[offset : offset + page_size(limit)], "total_entries": len(found)}


@router.post("/pools", status_code=201)
@needs(Permission.EDIT_POOLS)
async def post_pool(body: PoolBody, caller: Who) -> dict[str, Any]:
    async with caller.changing(Channel.READY) as conn:
        if any(row.name == body.name for row in await gates.list_gates(conn, kinds=["pool"])):
            raise Conflict(f"Pool with name: `{body.name}` already exists")
        await verbs.set_pool(conn, name=body.name, slots=body.slots, actor=caller.actor)
        return await _document(conn, await _find(conn, body.name))


@router.get("/pools/{pool_name}")
@needs(Permission.READ_GATES)
async def get_pool(pool_name: str, caller: Who) -> dict[str, Any]:
    async with caller.reading() as conn:
        return await _document(conn, await _find(conn, pool_name))


@router.patch("/pools/{pool_name}")
@needs(Permission.EDIT_POOLS)
async def patch_pool(pool_name: str, body: PoolPatch, caller: Who, update_mask: Texts = None) -> dict[str, Any]:
    if body.pool not in (None, pool_name):
        raise UserError("A pool cannot be given another name: make a new one.")
    async with caller.changing(Channel.READY) as conn:
        await _find(conn, pool_name)
        if body.slots is not None and (update_mask is None or "slots" in update_mask):
            await verbs.set_pool(conn, name=pool_name, slots=body.slots, actor=caller.actor)
        return await _document(conn, await _find(conn, pool_name))


@router.delete("/pools/{pool_name}", status_code=204)
@needs(Permission.EDIT_POOLS)
async def delete_pool(pool_name: str, caller: Who) -> None:
    async with caller.changing() as conn:
        await verbs.delete_pool(conn, name=pool_name, actor=caller.actor)


async def _find(conn: AsyncConnection, name: str) -> GateRow:
    for row in await gates.list_gates(conn, kinds=["pool"]):
        if row.name == name:
            return row
    raise NotFound(f"The Pool with name: `{name}` was not found")


async def _document(conn: AsyncConnection, row: GateRow) -> dict[str, Any]:
    held = await gates.holders(conn, row.gate_id)
    running = sum(each.weight for each in held if each.state == "running")
    waiting = sum(each.weight for each in await gates.waiters(conn, row.gate_id))
    return {
        "name": row.name,
        "slots": row.capacity,
        "description": None,
        "include_deferred": False,
        "occupied_slots": row.used,
        "running_slots": running,
        "queued_slots": row.used - running,
        "scheduled_slots": waiting,
        "open_slots": row.capacity - row.used,
        "deferred_slots": 0,
        "team_name": None,
    }
