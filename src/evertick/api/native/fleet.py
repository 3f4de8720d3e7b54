"""Runners and queues, and the health of what serves them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.paging import Page
from evertick.db.notify import Channel
from evertick.db.queries import runners, shards
from evertick.db.queries.runners import BusyRunner, QueueRow
from evertick.db.queries.shards import ShardRow
from evertick.domain.access import Permission
from evertick.domain.attempt import session_text
from evertick.engine.runners import drain, find_runners, undrain

router = APIRouter(route_class=GuardedRoute, tags=["fleet"])

Which = Annotated[str, Path(max_length=250, description="Its id, name or session.")]
_MOST, _MOST_COUNTED = 1000, 100_000


class Runner(BaseModel):
    """`session` as text: it has 63 bits, more than a number in JavaScript holds. `executor`: where its attempts run."""

    session: str
    runner_id: str
    name: str | None
    version: str
    host: str
    pid: int
    queues: list[str]
    match: list[str]
    executor: str
    slots: int
    busy: int
    request: str | None
    started_at: datetime
    beat_at: datetime
    silent_seconds: float


class Drain(BaseModel):
    """`then_leave`: it ends when nothing runs there any more."""

    model_config = ConfigDict(extra="forbid")
    then_leave: bool = False


class Asked(BaseModel):
    runners: list[Runner]


class Health(BaseModel):
    """`scheduler`: whether somebody leads. `runners` that live, and their slots."""

    database: str
    scheduler: str
    leader: str | None
    runners: int
    slots: int
    busy: int
    now: datetime


@router.get("/runners")
@requires(Permission.READ_RUNNERS)
async def list_runners(caller: Who) -> Page[Runner]:
    """Those that are alive."""
    async with caller.reading() as conn:
        found = await runners.list_busy(conn, limit=_MOST)
    return Page(items=[_runner(row) for row in found], next_cursor=None)


@router.post("/runners/{which}/drain")
@requires(Permission.DRAIN_RUNNERS)
async def drain_runner(which: Which, caller: Who, how: Drain | None = None) -> Asked:
    """It takes no new work and finishes what it has. An id or a name that several carry means all of them."""
    async with caller.changing(Channel.STOP) as conn:
        found = await find_runners(conn, [which])
        leaves = how.then_leave if how else False
        await drain(conn, sessions=[each.session for each in found], actor=caller.actor, then_leave=leaves)
    return Asked(runners=[_runner(each) for each in found])


@router.post("/runners/{which}/undrain")
@requires(Permission.DRAIN_RUNNERS)
async def undrain_runner(which: Which, caller: Who) -> Asked:
    async with caller.changing(Channel.STOP) as conn:
        found = await find_runners(conn, [which])
        asked = await undrain(conn, sessions=[each.session for each in found], actor=caller.actor)
    return Asked(runners=[_runner(each) for each in found if each.session in asked])


@router.get("/queues")
@requires(Permission.READ_RUNNERS)
async def list_queues(caller: Who) -> Page[QueueRow]:
    """What waits there, since when, and who serves them."""
    async with caller.reading() as conn:
        return Page(items=await runners.list_all(conn, cap=_MOST_COUNTED, limit=_MOST), next_cursor=None)


@router.get("/shards")
@requires(Permission.READ_METRICS)
async def list_shards(caller: Who) -> Page[ShardRow]:
    """Who leads which, since when, and how many DAGs it has. Of one shard there is little to tell."""
    async with caller.reading() as conn:
        return Page(items=await shards.page(conn), next_cursor=None)


@router.get("/health")
@requires(Permission.READ_METRICS)
async def show_health(caller: Who) -> Health:
    """Whether work can be planned and run."""
    async with caller.reading() as conn:
        found = await runners.list_busy(conn, limit=_MOST)
        leader = await shards.leader(conn, shard=0)
        now = await shards.read_clock(conn)
    is_led = leader is not None and not leader.unled
    return Health(
        database="healthy",
        scheduler="healthy" if is_led else "unhealthy",
        leader=leader.owner if leader is not None and is_led else None,
        runners=len(found),
        slots=sum(each.slots for each in found),
        busy=sum(each.busy for each in found),
        now=now,
    )


def _runner(row: BusyRunner) -> Runner:
    same = {name: getattr(row, name) for name in Runner.model_fields if name != "session"}
    return Runner(session=session_text(row.session), **same)
