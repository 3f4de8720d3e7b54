"""The routes of the agent API, with their models: start an attempt, heartbeat, append log lines, finish.

An agent can change only the attempt that its token names.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal, get_type_hints

import psycopg
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, create_model

from evertick.api.agent.auth import AgentRequest, AgentRoute, LeasedConnection, Who, shows
from evertick.api.agent.files import refuse_missing_file
from evertick.config import Settings
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.db.queries.runners import StartedRow
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.agent_protocol import AgentLimits, TokenUse, attempt_name
from evertick.domain.attempt import AttemptOrder, Outcome, OutcomeKind, TaskKey, storable_text
from evertick.domain.errors import Conflict, EvertickError, LeaseLost, PostgresUnavailable, UserError
from evertick.engine.remote_attempts import start_attempt
from evertick.engine.runners import extend
from evertick.runner.launch import LoadedVersion, attempt_order
from evertick.runner.remote.outcomes import channels_to_notify, record_outcome

Text = Annotated[str, Field(max_length=300)]


# Ranges of PostgreSQL's integer types.
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]


Offset = Annotated[int, Field(ge=0, lt=2**63)]


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Place(_Sent):
    """The location of the agent's process."""

    host: Text
    boot_id: Text
    pid_namespace: Text
    uid: Annotated[int, Field(ge=0, lt=2**31)]
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    pid_started: Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


class StartRequest(_Sent):
    """`nonce` is a random value of the agent's process. It distinguishes two agents started for the same attempt."""

    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    version: Text
    place: Place


# The fields of the attempt's order, with those of its key, so that the agent receives all that it needs to build it.
_ORDER = {**get_type_hints(TaskKey), **get_type_hints(AttemptOrder), "isolation": str}
del _ORDER["key"]
Order = create_model("Order", **{name: (kind, ...) for name, kind in _ORDER.items()})  # type: ignore[call-overload]


class StartAnswer(BaseModel):
    order: Order  # type: ignore[valid-type]
    uses_threads: bool
    limits: AgentLimits
    token: str
    renewal: str


class HeartbeatRequest(_Sent):
    """`wait_seconds`: how long the server may delay the response until there is something to report."""

    wait_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


Word = Literal["continue", "stop", "lost"]


class HeartbeatAnswer(BaseModel):
    """`rest_seconds`: delay until the next heartbeat. The tokens are empty for an attempt that has ended: the agent may send
    the rest of its log with the last one, until that expires."""

    word: Word
    rest_seconds: float
    token: str
    renewal: str


class LogUpload(_Sent):
    """Complete lines that cover the bytes `offset` to `end` of the attempt's log."""

    offset: Offset
    end: Offset
    content: Annotated[str, Field(max_length=1_000_000)]


class LogsRequest(_Sent):
    chunks: Annotated[list[LogUpload], Field(max_length=100)]


class LogsAnswer(BaseModel):
    """`until`: the end of the stored part of the log."""

    until: int


class FinishRequest(_Sent):
    kind: OutcomeKind
    reason: Annotated[str | None, Field(max_length=20_000)] = None
    result_json: str | None = None
    exit_code: Int | None = None
    no_retry: bool = False
    retry_after_seconds: Annotated[float | None, Field(ge=0, le=1e12, allow_inf_nan=False)] = None
    start_seconds: Annotated[float | None, Field(ge=0, le=1e9, allow_inf_nan=False)] = None
    usage: tuple[Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)], Offset] | None = None
    log: LogUpload | None = None


class FinishAnswer(BaseModel):
    is_recorded: bool


router = APIRouter(route_class=AgentRoute, tags=["attempts"])


@router.post("/start")
@shows(TokenUse.START)
async def start(agent: Who, request: StartRequest) -> StartAnswer:
    """Start the attempt. Only the agent that receives the response may run the code. A repeated nonce gets the same response."""
    bearer = agent.bearer
    name = attempt_name(bearer.key, bearer.epoch, bearer.session)
    new = {"runner_id": name, "version": request.version, **request.place.model_dump()}
    lost_after = agent.context.settings.agent_lost_after_seconds
    async with agent.lent() as lent:
        started = await start_attempt(lent.conn, bearer, nonce=request.nonce, agent=new, lost_after=lost_after)
        try:
            return await _answer(agent, lent, started)
        except (psycopg.Error, PostgresUnavailable, OSError):
            # Not an error of the task: the agent retries.
            raise
        except (EvertickError, IndexError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            failed = Outcome(key=bearer.key, epoch=bearer.epoch, kind=OutcomeKind.FAILED, reason=reason)
            await _record(agent, lent, failed)
            raise Conflict(f"The attempt cannot be started and has failed: {reason}") from None


@router.post("/heartbeat")
@shows(TokenUse.ATTEMPT)
async def heartbeat(agent: Who, request: HeartbeatRequest) -> HeartbeatAnswer:
    """Renew the attempt's lease and its tokens. The response may be delayed to report a stop request immediately (long polling)."""
    context, bearer = agent.context, agent.bearer
    usual = context.settings.heartbeat_seconds
    wait_seconds = min(request.wait_seconds, usual)
    word = await _extend(agent)
    # Each waiting request holds a connection. Above the limit, agents get an immediate response and poll again.
    may_wait = wait_seconds > 0 and context.stop_requests.waiting < context.settings.api_connections // 2
    if word == "continue" and may_wait and await context.stop_requests.wait(bearer.session, wait_seconds):
        word = await _extend(agent)
    rest_seconds = 0.0 if may_wait or word != "continue" else usual
    renewed = {"token": "", "renewal": ""} if word == "lost" else _tokens(agent)
    return HeartbeatAnswer(word=word, rest_seconds=rest_seconds, **renewed)


@router.post("/finish")
@shows(TokenUse.ATTEMPT)
async def finish(agent: Who, request: FinishRequest) -> FinishAnswer:
    """Report how the attempt ended. Repeating the report is harmless; after a lost lease it is refused and changes nothing."""
    bearer, log = agent.bearer, request.log
    result_json = _plain_json(request.result_json)
    await refuse_missing_file(agent, result_json)
    outcome = Outcome(
        key=bearer.key,
        epoch=bearer.epoch,
        result_json=result_json,
        **request.model_dump(exclude={"log", "result_json"}),
        log=storable_text(log.content).encode() if log else b"",
        log_offset=log.offset if log else 0,
        log_end=log.end if log else 0,
    )
    async with agent.lent() as lent:
        await _record(agent, lent, outcome)
    return FinishAnswer(is_recorded=True)


async def _record(agent: AgentRequest, lent: LeasedConnection, outcome: Outcome) -> None:
    context = agent.context
    done = await record_outcome(
        lent,
        context.versions,
        outcome,
        session=agent.bearer.session,
        infra_retries=context.settings.infra_retries,
        log=context.log,
    )
    await agent.wake(lent.conn, channels_to_notify(done, outcome))
    if done.refused:
        raise LeaseLost("This attempt lost its lease or has already ended: the outcome was discarded.")


async def _extend(agent: AgentRequest) -> Word:
    bearer = agent.bearer
    async with agent.lent() as lent:
        reply = await extend(lent.conn, session=bearer.session, held=[(bearer.key, bearer.epoch)])
    if reply.is_gone or reply.lost:
        return "lost"
    return "stop" if reply.stop else "continue"


async def _answer(agent: AgentRequest, lent: LeasedConnection, started: StartedRow) -> StartAnswer:
    bearer, context = agent.bearer, agent.context
    assert started.version_id is not None and started.attempt is not None and started.params is not None
    version: LoadedVersion = await context.versions.get(lent, started.version_id)
    task = version.spec.tasks[bearer.key.idx]
    provider = context.secret_provider
    granted = await provider.of_task(provider.stored(lent.get), task)
    facts = (*bearer.key, bearer.epoch, started.attempt, started.version_id, started.fire_at)
    claim = ExchangeRow("claim", *facts, started.params, started.inputs, 0, 0)
    made = attempt_order(claim, version, bearer.session, granted)
    return StartAnswer(
        order=Order(**made.key._asdict(), **asdict(made)),
        uses_threads=version.uses_threads is not None,
        limits=_limits(context.settings),
        **_tokens(agent),
    )


def _limits(settings: Settings) -> AgentLimits:
    return AgentLimits(
        heartbeat_seconds=settings.heartbeat_seconds,
        lost_after_seconds=settings.agent_lost_after_seconds,
        stop_grace_seconds=settings.stop_grace_seconds,
        log_head_bytes=settings.log_head_bytes,
        log_tail_bytes=settings.log_tail_bytes,
        result_spill_bytes=settings.result_spill_bytes,
        result_max_bytes=settings.result_max_bytes,
    )


def _tokens(agent: AgentRequest) -> dict[str, str]:
    bearer, tokens = agent.bearer, agent.context.agent_tokens
    return {
        "token": tokens.make_attempt_token(key=bearer.key, epoch=bearer.epoch, session=bearer.session),
        "renewal": tokens.make_start_token(key=bearer.key, epoch=bearer.epoch, session=bearer.session),
    }


def _plain_json(text: str | None) -> str | None:
    """Parse and re-encode the text: it is embedded in a JSON document and must be exactly one value."""
    if text is None:
        return None
    try:
        return json.dumps(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        raise UserError("result_json must be one JSON value, and not nested too deeply.") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


logs_router = APIRouter(route_class=AgentRoute, tags=["logs"])


@logs_router.post("/logs")
@shows(TokenUse.ATTEMPT)
async def append(agent: Who, request: LogsRequest) -> LogsAnswer:
    """Store log lines and return how far the log is stored. Lines already stored are skipped, so repeating a request is harmless.

    A request without lines only returns the position.
    """
    bearer = agent.bearer
    async with agent.lent() as lent:
        until = await logs.shipped_until(lent.conn, bearer.key, epoch=bearer.epoch)
        chunks: list[NewChunk] = []
        for each in request.chunks:
            if each.offset >= until and each.end > each.offset:
                text = storable_text(each.content)
                chunks.append(NewChunk(bearer.key, bearer.epoch, each.offset, each.end, text))
                until = each.end
        if chunks:
            await logs.append(lent.conn, session=bearer.session, chunks=chunks)
    return LogsAnswer(until=until)
