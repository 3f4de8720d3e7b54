"""claim for a remote executor, and the end of attempts that never started there.

A claim moves tasks from available to queued, with a separate session for each attempt; they run once their agent has started. The
runner decides what to submit and how (`services/dispatcher.py`); this module holds only what the database must know of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.engine.claim_cursor import ClaimCursor
from evertick.engine.claim_matching import Matching, look_for
from evertick.engine.step import MOST_REASON_CHARACTERS, storable
from evertick.store import dispatch
from evertick.store.db import retry_on_deadlock
from evertick.store.dispatch import EndedQueued, QueuedRow
from evertick.store.tasks import FROM_THE_HEAD


class QueuedEnd(StrEnum):
    """Why an attempt that never started is over."""

    LOST = "lost"
    FAILED = "failed"
    GIVEN_BACK = "given_back"
    STOPPED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverBegan:
    """An attempt that the executor does not have. `session` is the attempt's own."""

    key: TaskKey
    epoch: int
    session: int
    kind: QueuedEnd
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
        lambda: dispatch.claim(conn, session=session, queues=queues, free=free, look=look, sessions=sessions)
    )
    if cursor is not None:
        cursor.learn(rows, wanted=free, now=now)
    return rows


async def claim_matching_for_dispatch(
    conn: AsyncConnection, matching: Matching, *, session: int, free: int
) -> list[QueuedRow]:
    """The same for a runner with patterns."""
    begun, rows, chosen = await look_for(conn, matching, free)
    claims: list[QueuedRow] = []
    if chosen:
        places, seqs = [row.place for row in chosen], [row.seq for row in chosen]
        sessions = [draw_session() for _ in chosen]
        claims = await retry_on_deadlock(
            lambda: dispatch.claim_rows(
                conn, session=session, queues=matching.queues, places=places, seqs=seqs, sessions=sessions
            )
        )
    matching.note(begun, rows, chosen)
    return claims


async def end_queued(conn: AsyncConnection, ends: Sequence[NeverBegan], *, infra_retries: int) -> EndedQueued:
    """For a caller that knows that the executor does not have these. Attempts that started meanwhile are unchanged."""
    reports = [_report(end) for end in ends]
    return await retry_on_deadlock(lambda: dispatch.end_queued(conn, reports=reports, infra_retries=infra_retries))


def _report(end: NeverBegan) -> dict[str, object]:
    key = end.key
    place = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": end.epoch, "s": end.session}
    reason = storable(end.reason[:MOST_REASON_CHARACTERS])
    return {**place, "kind": end.kind.value, "reason": reason, "retry_in": end.retry_in_seconds}
