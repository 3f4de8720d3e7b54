"""Pools and keys: the tasks that hold them or wait for them. Editors can change the slots of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.auth import requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.db.queries import gates
from evertick.domain.access import Permission
from evertick.domain.errors import UserError
from evertick.engine.gates import delete_pool, set_pool
from evertick.operations.gates import KEY_KINDS, POOL_KINDS, find_gate
from evertick.ui.layout import PageRoute, done, form_of, page, segment

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Name = Annotated[str, Path(max_length=1000)]
_MOST, _SHOWN = 1000, 200


@router.get("/pools")
@requires(Permission.READ_GATES)
async def list_pools(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        found = await gates.list_gates(conn, kinds=list(POOL_KINDS), limit=_MOST)
    return page(request, "gates.html", here="pools", kind="pool", rows=found)


@router.get("/keys")
@requires(Permission.READ_GATES)
async def list_keys(request: Request, caller: Who) -> Response:
    """List the mutex keys and limits that tasks hold or wait for now."""
    async with caller.read() as conn:
        found = await gates.list_gates(conn, kinds=list(KEY_KINDS), limit=_MOST)
    return page(request, "gates.html", here="keys", kind="key", rows=found)


@router.get("/pools/{name}")
@requires(Permission.READ_GATES)
async def show_pool(name: Name, request: Request, caller: Who) -> Response:
    return await _show(request, caller, name, POOL_KINDS, "pool")


@router.get("/keys/{name:path}")
@requires(Permission.READ_GATES)
async def show_key(name: Name, request: Request, caller: Who) -> Response:
    return await _show(request, caller, name, KEY_KINDS, "key")


async def _show(request: Request, caller: Who, name: str, kinds: Sequence[str], kind: str) -> Response:
    async with caller.read() as conn:
        row = await find_gate(conn, kinds, name)
        held = await gates.holders(conn, row.gate_id, limit=_SHOWN)
        waiting = await gates.waiters(conn, row.gate_id, limit=_SHOWN)
    return page(request, "gate.html", here=f"{kind}s", kind=kind, row=row, held=held, waiting=waiting)


@router.post("/pools")
@requires(Permission.EDIT_POOLS)
async def put_pool(request: Request, caller: Who) -> Response:
    """Create a pool, or change its slots with immediate effect."""
    form = await form_of(request)
    name = form.get("name", "").strip()
    try:
        slots = int(form.get("slots", ""))
    except ValueError:
        raise UserError("Slots must be a whole number; 0 closes the pool.") from None
    async with caller.write(Channel.TASKS) as conn:
        made = await set_pool(conn, name=name, slots=slots, actor=caller.actor)
    return done(f"Pool {name} {'created' if made.is_new else 'changed'}: {slots} slots.")


@router.post("/pools/{name}/delete")
@requires(Permission.EDIT_POOLS)
async def remove_pool(name: Name, caller: Who) -> Response:
    async with caller.write() as conn:
        await delete_pool(conn, name=name, actor=caller.actor)
    return done(f"Pool {segment(name)} deleted.", go="/pools")
