"""What the attempts of a runner need: their version and code, stored values, answers to what they ask, and their logs.

A session reads only what it holds an attempt of.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import MaxLen
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from evertick.api.agent.files import BYTES, OCTETS, Hash
from evertick.api.agent.routes import Int, Offset, Text
from evertick.api.runner.auth import RunnerRoute, RunnerTokenUse, SessionCall, Who, shows
from evertick.api.runner.sent import Big, Ref, Sent, Session
from evertick.db.notify import Channel
from evertick.db.queries import dags, logs, runner_tokens, runs
from evertick.db.queries.logs import NewChunk
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.attempt import AttemptRef, TaskKey, storable_text
from evertick.domain.errors import LeaseLost, NotFound
from evertick.domain.stored_values import ValueKind
from evertick.logs.shipper import CHUNKS_PER_STATEMENT
from evertick.runner.asks import Asks

USES_THREADS = "X-Evertick-Uses-Threads"


class VersionAnswer(BaseModel):
    name: str
    bundle_hash: str
    file: str
    uses_threads: str | None
    spec: dict[str, Any]


class ValuesRequest(Sent):
    """`wanted`: kind and name of each value."""

    ref: Ref
    wanted: Annotated[list[tuple[ValueKind, Text]], MaxLen(1000)]


class ValuesAnswer(BaseModel):
    values: list[tuple[str, str, str]]


class AskRequest(Sent):
    ref: Ref
    verb: Text
    args: dict[str, Any]


class AskAnswer(BaseModel):
    value: Any


class LogChunk(Sent):
    """Lines of an attempt: the bytes of its log from `offset` to `end`."""

    ref: Ref
    offset: Offset
    end: Offset
    content: Annotated[str, Field(max_length=4 * 1024 * 1024)]


class LogsRequest(Sent):
    """`session`: another one than the caller's for what a dead runner of this machine left."""

    session: Session
    chunks: Annotated[list[LogChunk], MaxLen(CHUNKS_PER_STATEMENT)]


class LogsAnswer(BaseModel):
    is_stored: bool


class PositionRequest(Sent):
    session: Session
    ref: Ref


class PositionAnswer(BaseModel):
    until: int


class SessionsRequest(Sent):
    sessions: Annotated[list[Session], MaxLen(10_000)]


class SessionsAnswer(BaseModel):
    """Those that are alive, or belong to another token."""

    sessions: list[int]


class RunsRequest(Sent):
    runs: Annotated[list[Big], MaxLen(10_000)]


class RunsAnswer(BaseModel):
    runs: list[int]


router = APIRouter(route_class=RunnerRoute, tags=["attempts"])


@router.get("/versions/{version_id}")
@shows(RunnerTokenUse.SESSION)
async def version(call: Who, version_id: Int) -> VersionAnswer:
    """A DAG version of which the session holds an attempt."""
    async with call.lent() as lent:
        holds = await runner_tokens.holds_version(lent.conn, session=call.session, version_id=version_id)
        row = await dags.version(lent.conn, version_id) if holds else None
    if row is None:
        raise NotFound("This session holds no attempt of that version.")
    return VersionAnswer(**{name: getattr(row, name) for name in VersionAnswer.model_fields})


@router.get("/bundles/{bundle_hash}", response_class=Response, responses=BYTES)
@shows(RunnerTokenUse.SESSION)
async def bundle(call: Who, bundle_hash: Hash, is_kept: Annotated[bool, Query()] = False) -> Response:
    """The packed code of a version of which the session holds an attempt. `is_kept`: the runner has it, and needs only
    the header that says whether it uses threads."""
    async with call.lent() as lent:
        found = await runner_tokens.held_bundle(lent.conn, session=call.session, bundle_hash=bundle_hash)
    if found is None:
        raise NotFound("This hash is not the code of an attempt of this session.")
    headers = {USES_THREADS: str(int(found.uses_threads))}
    return Response(b"" if is_kept else found.archive, media_type=OCTETS, headers=headers)


@router.post("/values")
@shows(RunnerTokenUse.SESSION)
async def values(call: Who, request: ValuesRequest) -> ValuesAnswer:
    """The stored values that the task of an attempt declares."""
    wanted = [(str(kind), name) for kind, name in request.wanted]
    provider = call.context.secret_provider
    async with call.lent() as lent:
        await call.held(lent, _ref(request.ref))
        found = await provider.found(provider.stored(lent.get, _holder(call, request.ref)), wanted)
    return ValuesAnswer(values=[(kind, name, value) for (kind, name), value in found.items()])


@router.post("/ask")
@shows(RunnerTokenUse.SESSION)
async def ask(call: Who, request: AskRequest) -> AskAnswer:
    """What a running attempt asks for. A change that is asked for twice has the effect of one."""
    notified = _Notified()
    async with call.lent() as lent:
        asks = Asks(call.context.settings, link=lent, grants=call.context.secret_provider, notifier=notified)
        value = await asks.answer(_holder(call, request.ref), request.verb, request.args)
        await call.wake(lent, notified.channels)
    return AskAnswer(value=value)


@router.post("/logs")
@shows(RunnerTokenUse.SESSION)
async def append(call: Who, request: LogsRequest) -> LogsAnswer:
    """Store log lines of attempts that the session held. Lines already stored are skipped, so repeating it is harmless."""
    chunks = [
        NewChunk(
            key=_ref(each.ref).key,
            epoch=each.ref[3],
            seq=each.offset,
            until=each.end,
            content=storable_text(each.content),
        )
        for each in request.chunks
    ]
    async with call.lent() as lent:
        if request.session != call.session:
            row = await runner_tokens.joined(lent.conn, request.session)
            if row is None or row.token_id != call.who.token_id or not row.is_over:
                raise LeaseLost("That session is alive, or did not join with the token of this one.")
        await runner_tokens.append_logs(lent.conn, session=request.session, chunks=chunks)
    return LogsAnswer(is_stored=True)


@router.post("/logs/position")
@shows(RunnerTokenUse.SESSION)
async def position(call: Who, request: PositionRequest) -> PositionAnswer:
    """The end of what is stored of an attempt's log: the upload of what a dead runner left continues there."""
    ref = _ref(request.ref)
    async with call.lent() as lent:
        return PositionAnswer(until=await logs.shipped_until(lent.conn, ref.key, epoch=ref.epoch))


@router.post("/sessions/live")
@shows(RunnerTokenUse.SESSION)
async def live(call: Who, request: SessionsRequest) -> SessionsAnswer:
    """Those of these sessions whose logs this runner must leave alone."""
    async with call.lent() as lent:
        found = await runner_tokens.not_ended(lent.conn, token_id=call.who.token_id, sessions=request.sessions)
    return SessionsAnswer(sessions=sorted(found))


@router.post("/runs/existing")
@shows(RunnerTokenUse.SESSION)
async def existing(call: Who, request: RunsRequest) -> RunsAnswer:
    """Those of these runs that exist: the runner deletes the files of the others."""
    async with call.lent() as lent:
        return RunsAnswer(runs=sorted(await runs.existing(lent.conn, request.runs)))


class _Notified:
    """Collects the channels to notify."""

    def __init__(self) -> None:
        self.channels = set[Channel]()

    def wake(self, channel: Channel) -> None:
        self.channels.add(channel)


def _ref(ref: Ref) -> AttemptRef:
    return AttemptRef(TaskKey(*ref[:3]), ref[3])


def _holder(call: SessionCall, ref: Ref) -> AttemptHolder:
    return AttemptHolder(key=TaskKey(*ref[:3]), epoch=ref[3], session=call.session)
