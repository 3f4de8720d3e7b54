"""Pools, keys, queues, runners and schedulers: their load and their state.

Editors can change the slots of a pool, and operators can drain runners.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from evertick.api.context import Who
from evertick.db.queries import gates, runners
from evertick.db.queries import shards as shards_queries
from evertick.domain.access import Permission
from evertick.domain.attempt import session_text
from evertick.domain.errors import UserError
from evertick.operations import gates as gate_operations
from evertick.operations import launchers
from evertick.operations import runners as runner_operations
from evertick.operations.gates import KEY_KINDS, POOL_KINDS, PoolRequest
from evertick.operations.runners import DrainRequest
from evertick.ui.layout import Form, done, page, page_router, segment

router = page_router()

Name = Annotated[str, Path(max_length=1000)]
RunnerName = Annotated[str, Path(max_length=250)]
_MOST, _MOST_COUNTED = 1000, 100_000
_SHOWN, _SHOWN_TASKS = 200, 100
# After this many missed heartbeats a runner or an agent is shown as silent.
SILENT_HEARTBEATS = 3


@router.get("/pools", Permission.READ_GATES)
async def list_pools(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        found = await gates.list_gates(conn, kinds=list(POOL_KINDS), limit=_MOST)
    return page(request, "gates.html", here="pools", kind="pool", rows=found)


@router.get("/keys", Permission.READ_GATES)
async def list_keys(request: Request, caller: Who) -> Response:
    """List the mutex keys and limits that tasks hold or wait for now."""
    async with caller.read() as conn:
        found = await gates.list_gates(conn, kinds=list(KEY_KINDS), limit=_MOST)
    return page(request, "gates.html", here="keys", kind="key", rows=found)


@router.get("/pools/{name}", Permission.READ_GATES)
async def show_pool(name: Name, request: Request, caller: Who) -> Response:
    found = await gate_operations.show_pool(caller, name=name, limit=_SHOWN)
    return page(request, "gate.html", here="pools", kind="pool", row=found.record)


@router.get("/keys/{name:path}", Permission.READ_GATES)
async def show_key(name: Name, request: Request, caller: Who) -> Response:
    found = await gate_operations.show_key(caller, name=name, limit=_SHOWN)
    return page(request, "gate.html", here="keys", kind="key", row=found)


@router.post("/pools", Permission.EDIT_POOLS)
async def put_pool(form: Form, caller: Who) -> Response:
    """Create a pool, or change its slots with immediate effect."""
    name = form.get("name", "").strip()
    try:
        slots = int(form.get("slots", ""))
    except ValueError:
        raise UserError("Slots must be a whole number; 0 closes the pool.") from None
    changed = await gate_operations.put_pool(caller, name=name, body=PoolRequest(slots=slots))
    return done(f"Pool {name} {'created' if changed.record.is_new else 'changed'}: {slots} slots.")


@router.post("/pools/{name}/delete", Permission.EDIT_POOLS)
async def delete_pool(name: Name, caller: Who) -> Response:
    await gate_operations.delete_pool(caller, name=name)
    return done(f"Pool {segment(name)} deleted.", go="/pools")


@router.get("/runners", Permission.READ_RUNNERS)
async def list_runners(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        found = await runners.list_busy(conn, limit=_MOST, with_agents=False)
        silent_seconds = SILENT_HEARTBEATS * caller.context.settings.heartbeat_seconds
        agents = await runners.count_agents(conn, silent_seconds=silent_seconds)
        waiting = await runners.not_started(conn, limit=_SHOWN_TASKS)
    fleets = await launchers.read_fleets(caller)
    return page(
        request,
        "runners.html",
        here="runners",
        rows=found,
        waiting=waiting,
        agents=agents,
        fleets=fleets,
        is_cut=len(waiting) == _SHOWN_TASKS,
        silent_seconds=silent_seconds,
        slots=sum(each.slots for each in found),
        busy=sum(each.busy for each in found),
        session_text=session_text,
    )


@router.get("/queues", Permission.READ_RUNNERS)
async def list_queues(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        found = await runners.list_all(conn, cap=_MOST_COUNTED, limit=_MOST)
    return page(request, "queues.html", here="queues", rows=found, cap=_MOST_COUNTED)


@router.get("/schedulers", Permission.READ_METRICS)
async def list_schedulers(request: Request, caller: Who) -> Response:
    """The leader of each shard, and the standby schedulers."""
    async with caller.read() as conn:
        shards = await shards_queries.page(conn)
        others = await shards_queries.schedulers(conn)
    return page(request, "schedulers.html", here="schedulers", shards=shards, others=others)


@router.post("/runners/{runner}/drain", Permission.DRAIN_RUNNERS)
async def drain_runner(runner: RunnerName, form: Form, caller: Who) -> Response:
    leaves = form.get("then_leave") == "true"
    drained = await runner_operations.drain_runner(caller, runner=runner, body=DrainRequest(then_leave=leaves))
    then = "and then shuts down" if leaves else "and takes no new work"
    return done(f"{drained.runners[0].runner_id} finishes its running tasks {then}.")


@router.post("/runners/{runner}/undrain", Permission.DRAIN_RUNNERS)
async def undrain_runner(runner: RunnerName, caller: Who) -> Response:
    changed = (await runner_operations.undrain_runner(caller, runner=runner)).runners
    return done(f"{changed[0].runner_id if changed else runner} takes new work again.")
