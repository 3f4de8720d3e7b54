"""Runners, queues and shards, and the health of the system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from annotated_doc import Doc
from annotated_types import MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import runners, shards
from evertick.db.queries.runners import BusyRunner, QueueRow
from evertick.db.queries.shards import ShardRow
from evertick.domain.attempt import session_text
from evertick.domain.errors import UserError
from evertick.engine.runners import drain, find_runners, undrain
from evertick.operations.caller import Caller
from evertick.operations.paging import USUAL_ITEMS, Cursor, Limit, Page, RequestBody, record_of, short_page

# The length of a queue is counted up to here: a count of millions would take seconds.
MOST_QUEUED = 100_000
_MOST_RUNNERS = _MOST_QUEUES = 10_000

_Name = Annotated[str, MaxLen(250)]
RunnerName = Annotated[_Name, Doc("The runner's id, name or session.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatus:
    """A live runner. `session` is text, because its 63 bits do not fit in a number in JavaScript. `executor`: where its
    attempts run. `transport`: how it reaches Evertick, "database" or "https"."""

    session: str
    runner_id: str
    name: str | None
    version: str
    host: str
    pid: int
    queues: list[str]
    match: list[str]
    slots: int
    request: str | None
    started_at: datetime
    beat_at: datetime
    silent_seconds: float
    busy: int
    executor: str
    triggers: int
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest(RequestBody):
    """`then_leave`: the runner ends when all its attempts have ended."""

    then_leave: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainRequest(RequestBody):
    """Which runners: named ones, by id, name or session, or all that are alive."""

    runners: Annotated[Sequence[_Name], MaxLen(_MOST_RUNNERS)] = ()
    is_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRunnersRequest(UndrainRequest):
    """Which runners drain. `then_leave`: each ends when all its attempts have ended."""

    then_leave: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    runners: list[RunnerStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemHealth:
    """`scheduler`: healthy if shard 0 has a leader. `runners`: the number of live runners, with their slots."""

    database: str
    scheduler: str
    leader: str | None
    runners: int
    slots: int
    busy: int
    now: datetime


async def list_runners(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[RunnerStatus]:
    """List the live runners. The agents of remote attempts come last."""
    async with caller.read() as conn:
        found = await runners.list_busy(conn, limit=_MOST_RUNNERS)
    return short_page(found, limit, cursor, lambda row: (not row.queues, row.runner_id, row.session), _runner)


async def drain_runner(caller: Caller, *, runner: RunnerName, body: DrainRequest | None = None) -> DrainResult:
    """Drain a runner: it takes no new work and finishes its attempts. An id or name of several runners means all of them."""
    then_leave = body.then_leave if body else False
    return await drain_runners(caller, body=DrainRunnersRequest(runners=[runner], then_leave=then_leave))


async def drain_runners(caller: Caller, *, body: DrainRunnersRequest) -> DrainResult:
    """Drain several runners, or all. If one of them is not alive, nothing changes."""
    async with caller.write(Channel.STOP) as conn:
        found = await _selected(conn, body)
        sessions = [each.session for each in found]
        await drain(conn, sessions=sessions, actor=caller.actor, then_leave=body.then_leave)
    return DrainResult(runners=[_runner(each) for each in found])


async def undrain_runner(caller: Caller, *, runner: RunnerName) -> DrainResult:
    """Let a drained runner take work again."""
    return await undrain_runners(caller, body=UndrainRequest(runners=[runner]))


async def undrain_runners(caller: Caller, *, body: UndrainRequest) -> DrainResult:
    """Let several drained runners, or all, take work again. If one of them is not alive, nothing changes."""
    async with caller.write(Channel.STOP) as conn:
        found = await _selected(conn, body)
        asked = await undrain(conn, sessions=[each.session for each in found], actor=caller.actor)
    return DrainResult(runners=[_runner(each) for each in found if each.session in asked])


async def list_queues(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[QueueRow]:
    """List the queues: how many tasks wait, since when, and how many runners serve them."""
    async with caller.read() as conn:
        found = await runners.list_all(conn, cap=MOST_QUEUED, limit=_MOST_QUEUES)
    return short_page(found, limit, cursor, lambda row: (row.queue,), lambda row: row)


async def list_shards(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[ShardRow]:
    """List the shards: their leaders, since when, and how many DAGs they have."""
    async with caller.read() as conn:
        return short_page(await shards.page(conn), limit, cursor, lambda row: (row.shard,), lambda row: row)


async def show_health(caller: Caller) -> SystemHealth:
    """Show whether runs can be planned and executed."""
    async with caller.read() as conn:
        found = await runners.list_busy(conn, limit=_MOST_RUNNERS)
        leader = await shards.leader(conn, shard=0)
        now = await shards.read_clock(conn)
    is_led = leader is not None and not leader.unled
    return SystemHealth(
        database="healthy",
        scheduler="healthy" if is_led else "unhealthy",
        leader=leader.owner if leader is not None and is_led else None,
        runners=len(found),
        slots=sum(each.slots for each in found),
        busy=sum(each.busy for each in found),
        now=now,
    )


async def _selected(conn: AsyncConnection, selection: UndrainRequest) -> list[BusyRunner]:
    if selection.is_all == bool(selection.runners):
        raise UserError("Name runners, or select all of them with is_all. List them with `evertick runners list`.")
    if selection.is_all:
        return await runners.list_busy(conn, limit=_MOST_RUNNERS)
    return await find_runners(conn, selection.runners)


def _runner(row: BusyRunner) -> RunnerStatus:
    return record_of(RunnerStatus, row, session=session_text(row.session))
