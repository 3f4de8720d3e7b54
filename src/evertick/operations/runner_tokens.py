"""Join tokens of runners over HTTPS. The secret is returned once, when a token is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen

from evertick.db.notify import Channel
from evertick.db.queries import runner_tokens as queries
from evertick.db.queries.runner_tokens import RunnerTokenRow
from evertick.domain.access import LONGEST_NAME
from evertick.engine import runner_tokens as engine
from evertick.operations.caller import Caller
from evertick.operations.paging import LARGEST, USUAL_ITEMS, Cursor, Limit, Page, RequestBody, record_of, short_page

_MOST_TOKENS = 10_000

RunnerTokenId = Annotated[int, Ge(1), Le(LARGEST), Doc("The token's number.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerToken:
    """`runners`: how many live runners joined with it."""

    token_id: int
    name: str
    queues: list[str]
    created_by: str
    created_at: datetime
    expires_at: datetime
    is_expired: bool
    used_at: datetime | None
    used_from: str | None
    runners: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunnerToken(RequestBody):
    """Runners that join with it may serve these queues. `days`: how long it is valid."""

    name: Annotated[str, MinLen(1), MaxLen(LONGEST_NAME)] = "runners"
    queues: Annotated[Sequence[Annotated[str, MinLen(1), MaxLen(200)]], MinLen(1), MaxLen(engine.MOST_QUEUES)]
    days: Annotated[float, Ge(0), Le(engine.MOST_TOKEN_DAYS)] = engine.TOKEN_DAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedRunnerToken:
    """`secret` is shown only here."""

    token: RunnerToken
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedRunnerToken:
    """`runners`: how many runners take no new work now, and end with their last task."""

    runners: int


async def create_runner_token(caller: Caller, *, body: NewRunnerToken) -> CreatedRunnerToken:
    """Create a join token for runners over HTTPS. The response contains its secret, which is shown only once."""
    async with caller.write() as conn:
        row, secret = await engine.create(conn, name=body.name, queues=body.queues, days=body.days, actor=caller.actor)
    return CreatedRunnerToken(token=_token(row), secret=secret)


async def list_runner_tokens(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[RunnerToken]:
    """List the join tokens of runners that were not revoked."""
    async with caller.read() as conn:
        found = await queries.list_all(conn, limit=_MOST_TOKENS)
    return short_page(found, limit, cursor, lambda row: (row.token_id,), _token)


async def revoke_runner_token(caller: Caller, *, token_id: RunnerTokenId) -> RevokedRunnerToken:
    """Revoke a join token. Its runners take no new work from now on, and end with their last task."""
    async with caller.write(Channel.STOP) as conn:
        sessions = await engine.revoke(conn, token_id, actor=caller.actor)
    return RevokedRunnerToken(runners=len(sessions))


def _token(row: RunnerTokenRow) -> RunnerToken:
    return record_of(RunnerToken, row)
