"""Attempts at a remote executor: claimed, started by their agent, finished, or ended before they started.

A claim moves tasks from available to queued, with a separate session for each attempt. The runner decides what to
submit and how (`runner/remote/session.py`); this module holds only what the database must know of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from psycopg import AsyncConnection

from evertick.db.queries.runners import QueuedRow, StartedRow
from evertick.db.queries.tasks import FROM_THE_HEAD, ClaimPosition, ExchangeRow
from evertick.db.statements import sql_function
from evertick.domain.agent_protocol import AgentIdentity
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, LeaseLost
from evertick.engine.finish_and_claim import (
    MOST_REASON_CHARACTERS,
    ClaimCursor,
    Exchange,
    PatternClaims,
    exchange_of,
    next_patterns,
    storable,
)


class DispatchResult(StrEnum):
    """Why an attempt that never started is over."""

    LOST = "lost"
    FAILED = "failed"
    GIVEN_BACK = "given_back"
    STOPPED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """An attempt that the executor does not have. `session` is the attempt's own."""

    key: TaskKey
    epoch: int
    session: int
    kind: DispatchResult
    reason: str
    retry_in_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EndedQueued:
    """The sessions of the attempts that moved, and how many tasks can start now."""

    moved_sessions: list[int] | None
    offered: int


@sql_function(prepare=True)
async def _claim_for_dispatch(
    conn: AsyncConnection, look: ClaimPosition, *, session: int, queues: list[str], free: int, sessions: list[int]
) -> list[QueuedRow]:
    """`sessions`: one for each free slot, generated for the attempts."""


@sql_function(prepare=True)
async def queue_selected(
    conn: AsyncConnection, *, session: int, queues: list[str], places: list[int], seqs: list[int], sessions: list[int]
) -> list[QueuedRow]:
    """Claim these rows of the queue, if no other runner took them and there is capacity."""


@sql_function
async def _end_queued(
    conn: AsyncConnection, *, reports: list[dict[str, object]], infra_retries: int
) -> EndedQueued: ...


@sql_function(retries=False)
async def adopt_dispatches(conn: AsyncConnection, *, session: int, silent_seconds: float, most: int) -> int: ...


@sql_function(retries=False)
async def delete_dispatches(conn: AsyncConnection, sessions: list[int]) -> int: ...


@sql_function
async def _start_attempt(
    conn: AsyncConnection,
    key: TaskKey,
    *,
    epoch: int,
    session: int,
    nonce: str,
    agent: dict[str, object],
    lost_after: float,
) -> StartedRow: ...


@sql_function
async def _finish_attempt(
    conn: AsyncConnection, *, session: int, reports: str, infra_retries: int
) -> list[ExchangeRow]: ...


def draw_session() -> int:
    """A session id for an attempt: never issued twice, whatever happens to the database."""
    return secrets.randbits(63)


async def claim_for_dispatch(
    conn: AsyncConnection, *, session: int, queues: list[str], free: int, cursor: ClaimCursor | None = None
) -> list[QueuedRow]:
    """Up to so many, within the runner's recorded free slots. A lost reply is harmless: the claims are on its list."""
    now = time.monotonic()
    look = cursor.begin(now) if cursor is not None else FROM_THE_HEAD
    sessions = [draw_session() for _ in range(free)]
    rows = await _claim_for_dispatch(conn, look, session=session, queues=queues, free=free, sessions=sessions)
    if cursor is not None:
        cursor.learn(rows, wanted=free, now=now)
    return rows


async def claim_matching_for_dispatch(
    conn: AsyncConnection, matching: PatternClaims, *, session: int, free: int
) -> list[QueuedRow]:
    """The same for a runner with patterns."""
    begun, rows, chosen = await next_patterns(conn, matching, free)
    claims: list[QueuedRow] = []
    if chosen:
        places, seqs = [row.place for row in chosen], [row.seq for row in chosen]
        sessions = [draw_session() for _ in chosen]
        claims = await queue_selected(
            conn, session=session, queues=matching.queues, places=places, seqs=seqs, sessions=sessions
        )
    matching.note(begun, rows, chosen)
    return claims


async def end_queued(conn: AsyncConnection, ends: Sequence[NotStarted], *, infra_retries: int) -> EndedQueued:
    """For a caller that knows that the executor does not have these. Attempts that started meanwhile are unchanged."""
    return await _end_queued(conn, reports=[_report(end) for end in ends], infra_retries=infra_retries)


def _report(end: NotStarted) -> dict[str, object]:
    key = end.key
    place = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": end.epoch, "s": end.session}
    reason = storable(end.reason[:MOST_REASON_CHARACTERS])
    return {**place, "kind": end.kind.value, "reason": reason, "retry_in": end.retry_in_seconds}


_REFUSALS: dict[str, Conflict | LeaseLost] = {
    "duplicate": Conflict("Another agent has started this attempt: this one must not run it."),
    "canceled": Conflict("This attempt was canceled before it started."),
    "stale": LeaseLost("This attempt is no longer valid: it was declared lost, replaced, or is over."),
}


async def start_attempt(
    conn: AsyncConnection, bearer: AgentIdentity, *, nonce: str, agent: dict[str, object], lost_after: float
) -> StartedRow:
    """Repeating it with the same nonce after a lost reply returns the same reply. Raises Conflict or LeaseLost.

    `agent` is the location of its process: a runner on the same machine can prove that it is gone.
    """
    place = {"epoch": bearer.epoch, "session": bearer.session}
    row = await _start_attempt(conn, bearer.key, **place, nonce=nonce, agent=agent, lost_after=lost_after)
    if (refusal := _REFUSALS.get(row.verdict)) is not None:
        raise type(refusal)(str(refusal))
    return row


async def finish_attempt(conn: AsyncConnection, *, session: int, report: str, infra_retries: int) -> Exchange:
    """`report` is created by `step.report`. A rejected report was no longer the session's own, and changed nothing."""
    rows = await _finish_attempt(conn, session=session, reports=f"[{report}]", infra_retries=infra_retries)
    return exchange_of(rows, [])
