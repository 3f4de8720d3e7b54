"""claim for an executor elsewhere, and what becomes of attempts that never began there.

A claim moves tasks from available to queued, with a session of the attempt's own; they run once their agent has begun. What is
handed over and how is the runner's business (`services/dispatcher.py`); here is only what the database must know of it.
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
    """Why an attempt that never began is over."""

    LOST = "lost"
    FAILED = "failed"
    GIVEN_BACK = "given_back"
    STOPPED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverBegan:
    """The executor has nothing of it. `session` is the attempt's own."""

    key: TaskKey
    epoch: int
    session: int
    kind: QueuedEnd
    reason: str
    retry_in_seconds: float = 0.0


def draw_session() -> int:
    """Of an attempt: never given twice, whatever happens to the database."""
    return secrets.randbits(63)


async def claim_for_dispatch(
    conn: AsyncConnection, *, session: int, queues: list[str], free: int, cursor: ClaimCursor | None = None
) -> list[QueuedRow]:
    """Up to so many, as far as the runner's slots allow by what is recorded. A lost reply is harmless: they are on its list."""
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
    """The same for a runner of some names."""
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
    """For whoever knows that the executor has nothing of these. Those that began meanwhile stay as they are."""
    reports = [_report(end) for end in ends]
    return await retry_on_deadlock(lambda: dispatch.end_queued(conn, reports=reports, infra_retries=infra_retries))


def _report(end: NeverBegan) -> dict[str, object]:
    key = end.key
    place = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": end.epoch, "s": end.session}
    reason = storable(end.reason[:MOST_REASON_CHARACTERS])
    return {**place, "kind": end.kind.value, "reason": reason, "retry_in": end.retry_in_seconds}
