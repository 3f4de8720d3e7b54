"""Pools, and Airflow's default pool: the tasks without a pool. It has no gate in Evertick, so it never holds a task back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from psycopg import AsyncConnection
from pydantic import Field

from evertick.api.airflow import models, query
from evertick.api.airflow.labels import NO_POOL
from evertick.api.airflow.resources import Resource, routes_of
from evertick.api.context import ApiCaller
from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.db.queries.gates import Gate
from evertick.domain.access import Permission
from evertick.domain.dags.gates import MOST_SLOTS
from evertick.domain.errors import Conflict, UserError
from evertick.engine import gates as verbs

# In Airflow, -1 means unlimited.
ENDLESS = -1
Slots = Annotated[int, Field(ge=ENDLESS, le=MOST_SLOTS)]
Description = Annotated[str | None, Field(max_length=2000)]
# As in Airflow. The number of tasks without a pool is limited by the slots of the runners alone.
_DEFAULT = Gate(
    gate_id=0,
    kind="pool",
    name=NO_POOL,
    slots=128,
    used=0,
    holders=0,
    waiters=0,
    version=None,
    period=None,
    revision="0",
)
_KEYS = {"id": "gate_id", "name": "name", "pool": "name", "slots": "slots"}


class PoolBody(query.Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    slots: Slots
    description: Description = None
    include_deferred: bool = False
    team_name: Annotated[str | None, Field(max_length=50)] = None


class PoolPatch(query.Body):
    pool: str | None = None
    slots: Slots | None = None
    description: Description = None
    include_deferred: bool | None = None
    team_name: Annotated[str | None, Field(max_length=50)] = None


async def _rows(conn: AsyncConnection) -> list[Gate]:
    return [_DEFAULT, *(row for row in await gates.list_gates(conn, kinds=["pool"]) if row.name != NO_POOL)]


async def _page(
    caller: ApiCaller, conn: AsyncConnection, rows: list[Gate], order_by: list[str] | None, part: slice
) -> list[dict[str, Any]]:
    return await _documents(conn, query.ordered(rows, order_by, _KEYS)[part])


async def _create(caller: ApiCaller, conn: AsyncConnection, body: PoolBody, is_new: bool) -> None:
    _refuse(body.team_name, body.include_deferred)
    if is_new and any(row.name == body.name for row in await _rows(conn)):
        raise Conflict(f"Pool with name: `{body.name}` already exists")
    _refuse_default(body.name)
    await verbs.set_pool(conn, name=body.name, slots=_slots(body.slots), actor=caller.actor)
    if body.description is not None:
        await gates.describe_pool(conn, name=body.name, description=body.description)


async def _change(
    caller: ApiCaller, conn: AsyncConnection, name: str, patch: PoolBody | PoolPatch, update_mask: list[str] | None
) -> None:
    await _find(conn, name)
    _refuse_default(name)
    # As in Airflow, the body must be complete; fields outside the mask are ignored.
    fields = query.given_fields(patch, update_mask)
    if isinstance(patch, PoolPatch) and "pool" in fields and patch.pool not in (None, name):
        raise UserError("A pool cannot be renamed. Create a new one.")
    _refuse(
        patch.team_name if "team_name" in fields else None,
        patch.include_deferred if "include_deferred" in fields else None,
    )
    if "slots" in fields and patch.slots is not None:
        await verbs.set_pool(conn, name=name, slots=_slots(patch.slots), actor=caller.actor)
    if "description" in fields:
        await gates.describe_pool(conn, name=name, description=patch.description or "")


def _refuse(team: str | None, include_deferred: bool | None) -> None:
    query.refuse_team(team)
    if include_deferred:
        raise UserError("include_deferred must be false: a deferred task holds no slots in Evertick.")


def _refuse_default(name: str) -> None:
    if name == NO_POOL:
        raise UserError(f"{NO_POOL} stands for the tasks without a pool and cannot be changed. Create a pool instead.")


def _slots(given: int) -> int:
    return MOST_SLOTS if given == ENDLESS else given


async def _find(conn: AsyncConnection, name: str) -> Gate:
    rows = await _rows(conn)
    return query.first_of((row for row in rows if row.name == name), f"The Pool with name: `{name}` was not found")


async def _delete(caller: ApiCaller, conn: AsyncConnection, name: str) -> None:
    if name == NO_POOL:
        raise UserError("Default Pool can't be deleted")
    await verbs.delete_pool(conn, name=name, actor=caller.actor)


async def _one(caller: ApiCaller, conn: AsyncConnection, name: str) -> dict[str, Any]:
    return (await _documents(conn, [await _find(conn, name)]))[0]


async def _documents(conn: AsyncConnection, rows: Sequence[Gate]) -> list[dict[str, Any]]:
    texts = await gates.pool_descriptions(conn, [row.name for row in rows])
    return [await _document(conn, row, texts.get(row.name)) for row in rows]


async def _document(conn: AsyncConnection, row: Gate, description: str | None) -> dict[str, Any]:
    if row.name == NO_POOL:
        tasks = await gates.outside_pools(conn)
        used = tasks.running + tasks.queued
        return _figures(row, "Default pool", used=used, running=tasks.running, waiting=0)
    held = await gates.holders(conn, row.gate_id)
    running = sum(each.weight for each in held if each.state == "running")
    waiting = sum(each.weight for each in await gates.waiters(conn, row.gate_id))
    return _figures(row, description, used=row.used, running=running, waiting=waiting)


def _figures(row: Gate, description: str | None, *, used: int, running: int, waiting: int) -> dict[str, Any]:
    return {
        "name": row.name,
        "slots": ENDLESS if row.slots == MOST_SLOTS else row.slots,
        "description": description or None,
        "include_deferred": False,
        "occupied_slots": used,
        "running_slots": running,
        "queued_slots": used - running,
        "scheduled_slots": waiting,
        # A pool that was made smaller, and the default pool, can hold more tasks than they have slots.
        "open_slots": max(0, row.slots - used),
        "deferred_slots": 0,
    }


router = routes_of(
    Resource(
        name="pool",
        parameter="pool_name",
        path="/pools/{pool_name:path}",
        entity=PoolBody,
        change=PoolPatch,
        response=models.PoolResponse,
        collection=models.PoolCollectionResponse,
        reading=Permission.READ_GATES,
        editing=Permission.EDIT_POOLS,
        channels=(Channel.TASKS,),
        rows=_rows,
        page=_page,
        find=_one,
        name_of=lambda entity: entity.name,
        create=_create,
        update=_change,
        delete=_delete,
    )
)
