"""Pools, keys, and what holds work back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import MOST_ITEMS, IfMatch, Page, put_etag, refuse_stale
from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.db.queries.gates import GateRow, GateTask
from evertick.domain.access import Permission
from evertick.domain.dags.gates import MOST_SLOTS
from evertick.domain.errors import NotFound
from evertick.domain.explain import Blocked
from evertick.engine.gates import delete_pool, set_pool

router = APIRouter(route_class=GuardedRoute, tags=["gates"])

Name = Annotated[str, Path(max_length=1000)]
KEY_KINDS = ["mutex", "key", "group", "task", "dag", "order", "rate", "past"]
_MOST = 10_000


class PoolSlots(BaseModel):
    model_config = ConfigDict(extra="forbid")
    slots: Annotated[int, Field(ge=0, le=MOST_SLOTS)]


class Gate(BaseModel):
    """`version`: of an ordered key, the smallest that is open. `period`: of a rate, in seconds."""

    kind: str
    name: str
    slots: int
    used: int
    holders: int
    waiters: int
    version: int | None
    period: float | None


class GatePage(Gate):
    """Who has it, and who waits in which order."""

    held_by: list[GateTask]
    waiting: list[GateTask]


@router.get("/pools")
@requires(Permission.READ_GATES)
async def list_pools(caller: Who) -> Page[Gate]:
    async with caller.reading() as conn:
        found = await gates.list_gates(conn, kinds=["pool"], limit=_MOST)
    return Page(items=[_gate(row) for row in found], next_cursor=None)


@router.get("/pools/{name}")
@requires(Permission.READ_GATES)
async def show_pool(name: Name, response: Response, caller: Who) -> GatePage:
    """Its ETag is the number of slots."""
    async with caller.reading() as conn:
        page = await _page(conn, ["pool"], name)
    put_etag(response, _etag(page.slots))
    return page


@router.put("/pools/{name}")
@requires(Permission.EDIT_POOLS)
async def put_pool(name: Name, wanted: PoolSlots, response: Response, caller: Who, if_match: IfMatch = None) -> Gate:
    """Make it, or change its slots at once. With fewer than are taken, nothing new begins until there is room."""
    async with caller.changing(Channel.READY) as conn:
        if if_match is not None:
            refuse_stale(if_match, _etag((await find_gate(conn, ["pool"], name)).capacity))
        await set_pool(conn, name=name, slots=wanted.slots, actor=caller.actor)
        row = await find_gate(conn, ["pool"], name)
    put_etag(response, _etag(row.capacity))
    return _gate(row)


@router.delete("/pools/{name}", status_code=204)
@requires(Permission.EDIT_POOLS)
async def remove_pool(name: Name, caller: Who) -> None:
    """Only one that no DAG needs and no task holds."""
    async with caller.changing() as conn:
        await delete_pool(conn, name=name, actor=caller.actor)


@router.get("/keys")
@requires(Permission.READ_GATES)
async def list_keys(caller: Who) -> Page[Gate]:
    """Mutex keys and limits that tasks hold or wait for now."""
    async with caller.reading() as conn:
        found = await gates.list_gates(conn, kinds=KEY_KINDS, limit=_MOST)
    return Page(items=[_gate(row) for row in found], next_cursor=None)


@router.get("/keys/{name}")
@requires(Permission.READ_GATES)
async def show_key(name: Name, caller: Who, kind: Annotated[str | None, Query(max_length=20)] = None) -> GatePage:
    """Keys of two kinds may have one name: `kind` says which is meant."""
    async with caller.reading() as conn:
        return await _page(conn, [each for each in KEY_KINDS if kind in (None, each)], name)


@router.get("/blocked")
@requires(Permission.READ_GATES)
async def list_blocked(caller: Who) -> Page[Blocked]:
    """What holds back the most work now, over all runs."""
    async with caller.reading() as conn:
        return Page(items=await gates.blocked(conn, limit=MOST_ITEMS), next_cursor=None)


async def find_gate(conn: AsyncConnection, kinds: list[str], name: str) -> GateRow:
    for row in await gates.list_gates(conn, kinds=kinds, limit=_MOST):
        if row.name == name:
            return row
    raise NotFound(f"There is no {'pool' if kinds == ['pool'] else 'key'} {name[:200]!r} now.")


async def _page(conn: AsyncConnection, kinds: list[str], name: str) -> GatePage:
    row = await find_gate(conn, kinds, name)
    return GatePage(
        **_gate(row).model_dump(),
        held_by=await gates.holders(conn, row.gate_id, limit=MOST_ITEMS),
        waiting=await gates.waiters(conn, row.gate_id, limit=MOST_ITEMS),
    )


def _gate(row: GateRow) -> Gate:
    return Gate(
        kind=row.kind,
        name=row.name,
        slots=row.capacity,
        used=row.used,
        holders=row.holders,
        waiters=row.waiters,
        version=row.version,
        period=row.period,
    )


def _etag(slots: int) -> str:
    return f'"s{slots}"'
