"""Runners, queues and schedulers: their state, load and leadership. Operators can drain runners."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.auth import requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.db.queries import shards as shards_queries
from evertick.domain.access import Permission
from evertick.domain.attempt import session_text
from evertick.engine.runners import drain, find_runners, undrain
from evertick.ui.layout import PageRoute, done, form_of, page

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Which = Annotated[str, Path(max_length=250)]
_MOST, _MOST_COUNTED, _SHOWN = 1000, 100_000, 100
# After this many missed heartbeats a runner or an agent is shown as silent.
SILENT_HEARTBEATS = 3


@router.get("/runners")
@requires(Permission.READ_RUNNERS)
async def list_runners(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        found = await runners.list_busy(conn, limit=_MOST, with_agents=False)
        silent_seconds = SILENT_HEARTBEATS * caller.desk.settings.heartbeat_seconds
        agents = await runners.count_agents(conn, silent_seconds=silent_seconds)
        waiting = await runners.not_started(conn, limit=_SHOWN)
    return page(
        request,
        "runners.html",
        here="runners",
        rows=found,
        waiting=waiting,
        agents=agents,
        is_cut=len(waiting) == _SHOWN,
        silent_seconds=silent_seconds,
        slots=sum(each.slots for each in found),
        busy=sum(each.busy for each in found),
        session_text=session_text,
    )


@router.get("/queues")
@requires(Permission.READ_RUNNERS)
async def list_queues(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        found = await runners.list_all(conn, cap=_MOST_COUNTED, limit=_MOST)
    return page(request, "queues.html", here="queues", rows=found, cap=_MOST_COUNTED)


@router.get("/schedulers")
@requires(Permission.READ_METRICS)
async def list_schedulers(request: Request, caller: Who) -> Response:
    """The leader of each shard, and the standby schedulers."""
    async with caller.read() as conn:
        shards = await shards_queries.page(conn)
        others = await shards_queries.schedulers(conn)
    return page(request, "schedulers.html", here="schedulers", shards=shards, others=others)


@router.post("/runners/{which}/drain")
@requires(Permission.DRAIN_RUNNERS)
async def drain_runner(which: Which, request: Request, caller: Who) -> Response:
    leaves = (await form_of(request)).get("then_leave") == "true"
    async with caller.write(Channel.STOP) as conn:
        found = await find_runners(conn, [which])
        await drain(conn, sessions=[each.session for each in found], actor=caller.actor, then_leave=leaves)
    then = "and then shuts down" if leaves else "and takes no new work"
    return done(f"{found[0].runner_id} finishes its running tasks {then}.")


@router.post("/runners/{which}/undrain")
@requires(Permission.DRAIN_RUNNERS)
async def undrain_runner(which: Which, caller: Who) -> Response:
    async with caller.write(Channel.STOP) as conn:
        found = await find_runners(conn, [which])
        await undrain(conn, sessions=[each.session for each in found], actor=caller.actor)
    return done(f"{found[0].runner_id} takes new work again.")
