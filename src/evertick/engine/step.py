"""finish and claim, the two verbs of a runner, in one round trip and one commit.

The database decides whether an attempt may be retried; the recorded policy decides the delay.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.retry import RetryPolicy, delay_before
from evertick.engine.claim_cursor import ClaimCursor
from evertick.store import tasks
from evertick.store.db import retry_on_deadlock
from evertick.store.tasks import FROM_THE_HEAD, StepRow

MOST_REASON_CHARACTERS = 4000
LONGEST_RETRY_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The claims, the reports of attempts that were no longer ours, and whether more work is ready for others.

    `is_walking`: the queue was not read to its end, so it is worth claiming again at once. `has_arrivals`: a run or task ended
    that a schedule depends on.
    """

    claims: list[StepRow]
    refused: list[tuple[TaskKey, int]]
    has_more: bool
    is_walking: bool = False
    has_arrivals: bool = False


async def step(
    conn: AsyncConnection,
    *,
    session: int,
    reports: Sequence[str],
    queues: list[str],
    free: int,
    infra_retries: int,
    cursor: ClaimCursor | None = None,
) -> Stepped:
    """`reports` are created by `report`. Sending a report again after a lost reply is harmless.

    `cursor` must have been created for this many queues, and learns from the result.
    """
    reports_json = f"[{','.join(reports)}]" if reports else None
    now = time.monotonic()
    look = cursor.begin(now) if cursor is not None and free > 0 else FROM_THE_HEAD
    rows = await retry_on_deadlock(
        lambda: tasks.step(
            conn,
            session=session,
            reports_json=reports_json,
            infra_retries=infra_retries,
            queues=queues,
            free=free,
            look=look,
        )
    )
    claims = [row for row in rows if row.kind == "claim"]
    if cursor is not None and free > 0:
        cursor.learn(claims, wanted=free, now=now)
    return Stepped(
        claims=claims,
        refused=[(TaskKey(row.run_id, row.idx, row.map_index), row.epoch) for row in rows if row.kind == "refused"],
        has_more=any(row.kind == "more" for row in rows),
        has_arrivals=any(row.kind == "arrived" for row in rows),
    )


def report(outcome: Outcome, *, policy: RetryPolicy, attempt: int) -> str:
    """The end of one attempt, in the format of the SQL function."""
    key = outcome.key
    fields: dict[str, object] = {"r": key.run_id, "i": key.idx, "m": key.map_index, "e": outcome.epoch}
    fields["kind"] = outcome.kind.value
    if outcome.reason is not None:
        fields["reason"] = storable(outcome.reason[:MOST_REASON_CHARACTERS])
    if outcome.exit_code is not None:
        fields["exit_code"] = outcome.exit_code
    if outcome.kind in (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.KILLED):
        fields["no_retry"] = outcome.no_retry
        fields["retry_in"] = _retry_in(outcome, policy, attempt)
    if outcome.start_seconds is not None:
        fields["start_in"] = round(outcome.start_seconds, 3)
    if outcome.skips:
        fields["skip"] = outcome.skips
    if outcome.log:
        fields["log"] = outcome.log.decode("utf-8", "replace")
        fields["seq"], fields["until"] = outcome.log_offset, outcome.log_end
    text = json.dumps(fields)
    if outcome.result_json is None:
        return text
    return f'{text[:-1]}, "result": {outcome.result_json}}}'


def storable(text: str) -> str:
    """PostgreSQL's text allows neither NUL nor lone surrogates, and exceptions may contain both."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _retry_in(outcome: Outcome, policy: RetryPolicy, attempt: int) -> float:
    asked = outcome.retry_after_seconds
    if asked is not None and math.isfinite(asked):
        return min(max(asked, 0.0), LONGEST_RETRY_SECONDS)
    return delay_before(policy, max(attempt, 1), random.random())
