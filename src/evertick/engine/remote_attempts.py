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

from evertick.db.connect import retry_on_deadlock
from evertick.db.queries import runners
from evertick.db.queries.runners import EndedQueued, NewAgent, QueuedRow, StartedRow
from evertick.db.queries.tasks import FROM_THE_HEAD
from evertick.domain.agent_protocol import AgentIdentity
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import Conflict, LeaseLost
from evertick.engine.finish_and_claim import (
    MOST_REASON_CHARACTERS,
    ClaimCursor,
    Exchange,
    PatternClaims,
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
    rows = await retry_on_deadlock(
        lambda: runners.claim(conn, session=session, queues=queues, free=free, look=look, sessions=sessions)
    )
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
        claims = await retry_on_deadlock(
            lambda: runners.claim_rows(
                conn, session=session, queues=matching.queues, places=places, seqs=seqs, sessions=sessions
            )
        )
    matching.note(begun, rows, chosen)
    return claims


async def end_queued(conn: AsyncConnection, ends: Sequence[NotStarted], *, infra_retries: int) -> EndedQueued:
    """For a caller that knows that the executor does not have these. Attempts that started meanwhile are unchanged."""
    reports = [_report(end) for end in ends]
    return await retry_on_deadlock(lambda: runners.end_queued(conn, reports=reports, infra_retries=infra_retries))


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
    conn: AsyncConnection, bearer: AgentIdentity, *, nonce: str, agent: NewAgent, lost_after: float
) -> StartedRow:
    """Repeating it with the same nonce after a lost reply returns the same reply. Raises Conflict or LeaseLost."""
    row = await retry_on_deadlock(
        lambda: runners.start(
            conn,
            bearer.key,
            epoch=bearer.epoch,
            session=bearer.session,
            nonce=nonce,
            agent=agent,
            lost_after=lost_after,
        )
    )
    if (refusal := _REFUSALS.get(row.verdict)) is not None:
        raise type(refusal)(str(refusal))
    return row


async def finish_attempt(conn: AsyncConnection, *, session: int, report: str, infra_retries: int) -> Exchange:
    """`report` is created by `step.report`. A rejected report was no longer the session's own, and changed nothing."""
    rows = await retry_on_deadlock(
        lambda: runners.finish(conn, session=session, reports_json=f"[{report}]", infra_retries=infra_retries)
    )
    return Exchange(
        claims=[],
        refused=[(TaskKey(row.run_id, row.idx, row.map_index), row.epoch) for row in rows if row.kind == "refused"],
        has_more=any(row.kind == "more" for row in rows),
        has_arrivals=any(row.kind == "arrived" for row in rows),
    )
