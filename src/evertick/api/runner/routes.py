"""The routes of the runner API, with their models: join, exchange, heartbeat, wait, leave, and what attempts need.

Each calls what a runner with a database connection calls. A session changes only what it holds.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal

import psycopg
from fastapi import APIRouter
from pydantic import BaseModel, Field

from evertick.api.agent.auth import LeasedConnection
from evertick.api.agent.routes import Int, Offset, Place, Text
from evertick.api.runner.auth import Joining, RunnerRoute, RunnerTokenUse, Who, shows
from evertick.api.runner.files import refuse_missing_files
from evertick.api.runner.sent import Big, Ref, Sent, Session
from evertick.api.runner.waiting import Waiter
from evertick.db.connection import TimedConnection
from evertick.db.notify import Channel
from evertick.db.queries import runner_tokens, runners
from evertick.db.queries.runners import ListedRunner, NewRunner
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import AttemptRef, HeartbeatReply, OutcomeKind, TaskKey
from evertick.domain.errors import ReportRefused, UserError
from evertick.domain.failover import Server
from evertick.domain.routing import read_pattern
from evertick.engine import runner_tokens as engine
from evertick.engine.runners import mark_runner_dead
from evertick.engine.triggers import TriggerRow, exchange_triggers
from evertick.runner.database_access import channels_after, declared_dead_reason
from evertick.runner.round_trips import MOST_HELD
from evertick.secrets.runner_tokens import RunnerIdentity

MOST_SLOTS = 10_000
MOST_REPORTS = 1000
MOST_TRIGGERS = 100_000
# Shorter than the timeout of usual proxies; longer waits save little.
LONGEST_WAIT_SECONDS = 25.0

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Refs = Annotated[list[Ref], Field(max_length=MOST_HELD * MOST_SLOTS)]
# A server's system identifier and timeline.
ServerId = tuple[Big, Int]


class JoinRequest(Sent):
    """`match`: patterns of the tasks that it serves. `request`: a drain request that still applies to this runner."""

    session: Session
    runner_id: Text
    name: Text | None = None
    version: Text
    place: Place
    queues: Annotated[list[Text], Field(min_length=1, max_length=engine.MOST_QUEUES)]
    match: Annotated[list[Text], Field(max_length=1000, default_factory=list)]
    slots: Annotated[int, Field(ge=1, le=MOST_SLOTS)]
    request: Literal["drain", "leave"] | None = None
    lost_after_seconds: Seconds


class PeerRecord(BaseModel):
    """A live runner."""

    session: int
    runner_id: str
    host: str
    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    pid_started: float
    queues: list[str]
    slots: int
    started_at: datetime
    silent_seconds: float


class JoinAnswer(BaseModel):
    """`token` authenticates all other requests. `unmatched`: patterns that match no task, with the reason."""

    token: str
    server: ServerId | None
    namesakes: list[PeerRecord]
    unmatched: list[tuple[str, str]]


class Report(Sent):
    """How one attempt ended, as `encode_report` encodes it."""

    r: Big
    i: Int
    m: Int
    e: Int
    kind: OutcomeKind
    reason: str | None = None
    exit_code: Int | None = None
    retry_in: Seconds | None = None
    no_retry: bool | None = None
    start_in: Seconds | None = None
    cpu: Seconds | None = None
    mem: Big | None = None
    skip: list[Int] | None = None
    result: Any = None
    log: str | None = None
    seq: Offset | None = None
    until: Offset | None = None


class ExchangeRequest(Sent):
    """`server`: the database server that the runner knows. If it is another one by now, nothing is claimed."""

    reports: Annotated[list[Report], Field(max_length=MOST_REPORTS, default_factory=list)]
    free: Annotated[int, Field(ge=0, le=MOST_HELD * MOST_SLOTS)]
    server: ServerId | None = None


class ExchangeAnswer(BaseModel):
    claims: list[dict[str, Any]]
    refused: list[Ref]
    has_more: bool
    is_walking: bool
    server: ServerId | None


class TriggerReport(Sent):
    """How one trigger ended, as `encode_end` encodes it. Without a value it is returned."""

    r: Big
    i: Int
    m: Int
    e: Int
    value: Any = None
    log: str | None = None
    seq: Offset | None = None
    until: Offset | None = None


class TriggersRequest(Sent):
    """`held`: the triggers that the runner holds, with the reported ones; null: only report."""

    reports: Annotated[list[TriggerReport], Field(max_length=MOST_REPORTS, default_factory=list)]
    held: Annotated[list[Ref] | None, Field(max_length=MOST_TRIGGERS)]
    free: Annotated[int, Field(ge=0, le=MOST_TRIGGERS)]


class TriggersAnswer(BaseModel):
    """`lost`: triggers that it no longer holds; `stopped`: those whose wait a person ended."""

    started: list[dict[str, Any]]
    lost: list[Ref]
    stopped: list[Ref]
    refused: list[Ref]


class HeartbeatRequest(Sent):
    held: Refs


class HeartbeatAnswer(BaseModel):
    """`token` replaces the session's token. `has_triggers`: triggers wait for a session that runs them."""

    is_gone: bool
    request: str | None
    lost: list[Ref]
    stop: list[Ref]
    unknown: list[Ref]
    has_triggers: bool
    server: ServerId | None
    token: str


class WaitRequest(Sent):
    """`request`: the drain request that the runner knows."""

    free: Annotated[int, Field(ge=0, le=MOST_HELD * MOST_SLOTS)]
    request: Literal["", "drain", "leave"] = ""
    seconds: Annotated[float, Field(ge=0, le=LONGEST_WAIT_SECONDS)]


class WaitAnswer(BaseModel):
    """`rest_seconds`: how long to pause before the next wait."""

    channels: list[Channel]
    rest_seconds: float


class PeersRequest(Sent):
    place: Place


class PeersAnswer(BaseModel):
    peers: list[PeerRecord]


class DeadRequest(Sent):
    session: Session


class DeadAnswer(BaseModel):
    attempts: int


class LeaveAnswer(BaseModel):
    is_recorded: bool


router = APIRouter(route_class=RunnerRoute, tags=["session"])


@router.post("/join")
@shows(RunnerTokenUse.JOIN)
async def join(call: Joining, request: JoinRequest) -> JoinAnswer:
    """Register a session. Repeating it is harmless, and renews the session's token."""
    for pattern in request.match:
        read_pattern(pattern)
    told = request.model_dump(exclude={"place"})
    new = NewRunner(**told, **request.place.model_dump())
    async with call.lent() as lent:
        await engine.join(lent.conn, call.token, new, origin=call.origin)
        joined = await call.context.joined.get(lent.conn, new.session)
        namesakes = await runners.namesakes(lent.conn, runner_id=new.runner_id, session=new.session)
        unmatched = await joined.claims.unmatched(lent.conn)
        await call.wake(lent, {Channel.RUNNER})
        server = _server(lent)
    who = RunnerIdentity(
        session=new.session, token_id=call.token.token_id, claims_until=call.token.expires_at.timestamp()
    )
    return JoinAnswer(
        token=call.context.runner_tokens.make(who),
        server=server,
        namesakes=[_peer(each) for each in namesakes],
        unmatched=unmatched,
    )


@router.post("/exchange")
@shows(RunnerTokenUse.SESSION)
async def exchange(call: Who, request: ExchangeRequest) -> ExchangeAnswer:
    """Report ended attempts and claim up to `free` tasks, in one commit. A repeated report changes nothing; claims whose
    answer was lost are listed as unknown by the next heartbeat, which the runner returns."""
    reports = [_text(each) for each in request.reports]
    await refuse_missing_files(call, request.reports)
    async with call.lent() as lent:
        joined, server = await call.joined(lent), _server(lent)
        is_same = request.server is None or request.server == server
        free = min(request.free, MOST_HELD * joined.row.slots) if is_same and call.who.may_claim else 0
        try:
            answer = await joined.claims.exchange(lent.conn, reports=reports, free=free)
        except (psycopg.OperationalError, psycopg.InterfaceError):
            raise
        except psycopg.Error as error:
            raise ReportRefused(str(error).splitlines()[0] if request.reports else str(error)) from None
        await call.wake(lent, channels_after(answer, (each.kind for each in request.reports)))
    return ExchangeAnswer(
        claims=[_claim(row) for row in answer.claims],
        refused=[(*key, epoch) for key, epoch in answer.refused],
        has_more=answer.has_more,
        is_walking=answer.is_walking,
        server=server,
    )


@router.post("/triggers")
@shows(RunnerTokenUse.SESSION)
async def triggers(call: Who, request: TriggersRequest) -> TriggersAnswer:
    """Report ended triggers, learn which are not held any more, and lease up to `free`. A repeated report changes nothing."""
    reports = [_text(each) for each in request.reports]
    held = None if request.held is None else [AttemptRef(TaskKey(*ref[:3]), ref[3]) for ref in request.held]
    async with call.lent() as lent:
        row = (await call.joined(lent)).row
        answer = await exchange_triggers(
            lent.conn,
            session=call.session,
            reports=reports,
            held=held,
            queues=row.queues,
            match=row.match,
            free=request.free if call.who.may_claim else 0,
        )
        await call.wake(lent, {Channel.TASKS} if answer.has_more else set())
    return TriggersAnswer(
        started=[_claim(each) for each in answer.started],
        lost=_refs(answer.lost),
        stopped=_refs(answer.stopped),
        refused=_refs(answer.refused),
    )


@router.post("/heartbeat")
@shows(RunnerTokenUse.SESSION)
async def heartbeat(call: Who, request: HeartbeatRequest) -> HeartbeatAnswer:
    """Renew all leases of the session, and its token. The answer says what it lost, must stop, or does not know."""
    held = [(TaskKey(*ref[:3]), ref[3]) for ref in request.held]
    async with call.lent() as lent:
        reply: HeartbeatReply = await engine.extend_over_https(lent.conn, session=call.session, held=held)
        server = _server(lent)
    return HeartbeatAnswer(
        is_gone=reply.is_gone,
        request=reply.request,
        lost=_refs(reply.lost),
        stop=_refs(reply.stop),
        unknown=_refs(reply.unknown),
        has_triggers=reply.has_triggers,
        server=server,
        token=call.context.runner_tokens.make(call.who),
    )


@router.post("/wait")
@shows(RunnerTokenUse.SESSION)
async def wait(call: Who, request: WaitRequest) -> WaitAnswer:
    """Answers when there is something to do: tasks to claim, or a request that the next heartbeat brings (long polling)."""
    context = call.context
    # Each waiting request holds a connection. Above the limit, runners pause instead.
    if context.waiting_runners.count >= context.settings.api_connections // 2:
        return WaitAnswer(channels=[Channel.TASKS, Channel.STOP], rest_seconds=context.settings.tick_seconds)
    joined = context.joined.known(call.session)
    if joined is None:
        async with call.lent() as lent:
            joined = await call.joined(lent)
    row = joined.row
    waiter = Waiter(
        session=call.session,
        queues=frozenset(row.queues),
        has_patterns=bool(row.match),
        free=request.free,
        request=request.request,
    )
    found = await context.waiting_runners.wait(waiter, request.seconds)
    return WaitAnswer(channels=sorted(found), rest_seconds=0.0)


@router.post("/peers")
@shows(RunnerTokenUse.SESSION)
async def peers(call: Who, request: PeersRequest) -> PeersAnswer:
    """The other live runners of this machine that joined with the same token."""
    place = request.place
    async with call.lent() as lent:
        found = await runner_tokens.peers(
            lent.conn,
            token_id=call.who.token_id,
            host=place.host,
            boot_id=place.boot_id,
            pid_namespace=place.pid_namespace,
        )
    return PeersAnswer(peers=[_peer(each) for each in found])


@router.post("/dead")
@shows(RunnerTokenUse.SESSION)
async def declare_dead(call: Who, request: DeadRequest) -> DeadAnswer:
    """A runner that joined with the same token is provably gone, with all of its processes."""
    async with call.lent() as lent:
        row = await runner_tokens.joined(lent.conn, request.session)
        if row is None or row.token_id != call.who.token_id:
            raise UserError("A runner can declare dead only runners that joined with its own token.")
        held = await mark_runner_dead(
            lent.conn,
            session=row.session,
            reason=declared_dead_reason(row.runner_id),
            infra_retries=call.context.settings.infra_retries,
        )
        await call.wake(lent, {Channel.TASKS})
    return DeadAnswer(attempts=held)


@router.post("/leave")
@shows(RunnerTokenUse.SESSION)
async def leave(call: Who) -> LeaveAnswer:
    """The session ends, and holds nothing."""
    async with call.lent() as lent:
        await runners.leave(lent.conn, call.session)
    return LeaveAnswer(is_recorded=True)


def _server(lent: LeasedConnection) -> ServerId | None:
    found: Server | None = lent.conn.server if isinstance(lent.conn, TimedConnection) else None
    return None if found is None else (found.system_id, found.timeline)


def _refs(refs: list[AttemptRef]) -> list[Ref]:
    return [(*ref.key, ref.epoch) for ref in refs]


def _peer(row: ListedRunner) -> PeerRecord:
    return PeerRecord(**{name: getattr(row, name) for name in PeerRecord.model_fields})


def _claim(row: ExchangeRow | TriggerRow) -> dict[str, Any]:
    told = row._asdict()
    return {**told, "fire_at": row.fire_at and row.fire_at.isoformat()}


def _text(report: Report | TriggerReport) -> str:
    try:
        return json.dumps(report.model_dump(exclude_unset=True), allow_nan=False)
    except (ValueError, RecursionError):
        raise UserError("The result of a report is not valid JSON, or is nested too deeply.") from None
