"""A runner's exchange: records how attempts ended and claims tasks, in one commit. Sending a report twice is harmless.

Also the claim order: cursors into the queues, and turns for the longest waiting. There is one ready list per queue and
priority: 10 x the position of its queue in the runner's order, plus its rank: 0 for priority 9, to 9 for priority 0.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.db.queries.runners import NamedTask, QueuedRow, QueuedTask
from evertick.db.queries.tasks import FROM_THE_HEAD, ClaimPosition, ExchangeRow
from evertick.db.statements import sql_function
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.retry import RetryPolicy, delay_before
from evertick.domain.routing import Pattern, address_of, matches

# Priorities 9 to 0 as ranks 0 to 9: one ready list for each, in each queue.
RANKS = 10


def overdue(waited_seconds: Mapping[int, float], aging_seconds: float) -> list[int]:
    """The places whose heads are served first, the most overdue first. `waited_seconds` is how long each head has waited.

    Mirrors the SQL function `overdue`; a test compares both.

    A head may wait `aging_seconds` for each level between it and the list that would be served next. A list in another
    queue of the same runner, which is later by queue order alone, counts as at least one level away.
    """
    if not waited_seconds:
        return []
    first = min(waited_seconds)
    late = {
        place: waited - aging_seconds * _levels_between(first, place)
        for place, waited in waited_seconds.items()
        if place != first
    }
    return sorted((place for place in late if late[place] > 0), key=lambda place: (-late[place], place))


def _levels_between(first: int, place: int) -> int:
    levels = place % RANKS - first % RANKS
    return levels if place // RANKS == first // RANKS else max(1, levels)


LOOK_SECONDS = 0.25


class AgingTurns:
    """One runner's state. Times are seconds of any monotonic clock; an ageing of 0 is strict priority."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._was_fair = False
        self._looked_at = -LOOK_SECONDS

    def take(self, now: float) -> float | None:
        """The ageing of this claim, or None for strict order."""
        is_fair = self._aging_seconds > 0 and not self._was_fair and now - self._looked_at >= LOOK_SECONDS
        self._was_fair = is_fair
        if is_fair:
            self._looked_at = now
        return self._aging_seconds if is_fair else None


# A position in the queue is assigned before the transaction that fills it commits, and a claim skips rows locked by others;
# so the cursor stays this far behind, which almost no transaction outlasts, and a full scan finds the rest.
LAG_SECONDS = 2.0


FULL_LOOK_SECONDS = 5.0


# If there is nothing after the cursor, a task may wait before it.
EMPTY_LOOK_SECONDS = 1.0


class ClaimCursor:
    """One runner's cursor. Times are seconds of any monotonic clock. An ageing of 0 is strict priority."""

    def __init__(self, queue_count: int, *, aging_seconds: float = 0.0) -> None:
        self._turns = AgingTurns(aging_seconds)
        self._low = [0] * (RANKS * queue_count)
        self._claimed: deque[tuple[float, int, int]] = deque()
        self._looked_at = -FULL_LOOK_SECONDS
        self._came_back_empty = False

    def begin(self, now: float) -> ClaimPosition:
        """Where to start, and in which order."""
        return ClaimPosition(self._begin(now), self._turns.take(now))

    def _begin(self, now: float) -> list[int] | None:
        """For each queue and rank the first position to read; None for a full scan."""
        limit = EMPTY_LOOK_SECONDS if self._came_back_empty else FULL_LOOK_SECONDS
        if now - self._looked_at >= limit:
            self._looked_at = now
            return None
        while self._claimed and now - self._claimed[0][0] >= LAG_SECONDS:
            _, place, seq = self._claimed.popleft()
            self._low[place] = max(self._low[place], seq)
        return self._low

    def learn(self, claims: Sequence[ExchangeRow | QueuedRow], *, wanted: int, now: float) -> None:
        """Record the result of a claim that wanted `wanted` tasks."""
        self._came_back_empty = len(claims) < wanted
        newest = {claim.place: claim.seq for claim in claims}
        self._claimed.extend((now, place, seq) for place, seq in newest.items())


MOST_REASON_CHARACTERS = 4000


LONGEST_RETRY_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The claims, the reports of attempts that were no longer ours, and whether more work is ready for others.

    `is_walking`: the queue was not read to its end, so it is worth claiming again at once. `has_arrivals`: a run or task ended
    that a schedule depends on.
    """

    claims: list[ExchangeRow]
    refused: list[tuple[TaskKey, int]]
    has_more: bool
    is_walking: bool = False
    has_arrivals: bool = False


@sql_function(prepare=True)
async def _finish_and_claim(
    conn: AsyncConnection,
    *,
    session: int,
    reports: str | None,
    infra_retries: int,
    queues: list[str],
    free: int,
    look: ClaimPosition = FROM_THE_HEAD,
) -> list[ExchangeRow]:
    """The one hot statement: records what ended and claims what is free, in one round trip and one commit."""


@sql_function(prepare=True)
async def claim_selected(
    conn: AsyncConnection, *, session: int, queues: list[str], places: list[int], seqs: list[int]
) -> list[ExchangeRow]:
    """Claim these rows of the queue, if no other runner took them."""


async def finish_and_claim(
    conn: AsyncConnection,
    *,
    session: int,
    reports: Sequence[str],
    queues: list[str],
    free: int,
    infra_retries: int,
    cursor: ClaimCursor | None = None,
) -> Exchange:
    """`reports` are created by `report`. Sending a report again after a lost reply is harmless.

    `cursor` must have been created for this many queues, and learns from the result.
    """
    reports_json = f"[{','.join(reports)}]" if reports else None
    now = time.monotonic()
    look = cursor.begin(now) if cursor is not None and free > 0 else FROM_THE_HEAD
    rows = await _finish_and_claim(
        conn, session=session, reports=reports_json, infra_retries=infra_retries, queues=queues, free=free, look=look
    )
    claims = [row for row in rows if row.kind == "claim"]
    if cursor is not None and free > 0:
        cursor.learn(claims, wanted=free, now=now)
    return exchange_of(rows, claims)


def exchange_of(rows: Sequence[ExchangeRow], claims: list[ExchangeRow]) -> Exchange:
    return Exchange(
        claims=claims,
        refused=[(TaskKey(row.run_id, row.idx, row.map_index), row.epoch) for row in rows if row.kind == "refused"],
        has_more=any(row.kind == "more" for row in rows),
        has_arrivals=any(row.kind == "arrived" for row in rows),
    )


def encode_report(outcome: Outcome, *, policy: RetryPolicy, attempt: int) -> str:
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
    elif outcome.kind is OutcomeKind.GIVEN_BACK and outcome.retry_after_seconds:
        fields["retry_in"] = min(outcome.retry_after_seconds, LONGEST_RETRY_SECONDS)
    if outcome.start_seconds is not None:
        fields["start_in"] = round(outcome.start_seconds, 3)
    if outcome.usage is not None:
        fields["cpu"], fields["mem"] = outcome.usage
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


WINDOW = 500


FULL_SCAN_SECONDS = 60.0


MOST_VERDICTS = 500_000


class PatternClaims:
    """One runner's state: which tasks it serves, and how far it has read each queue. May be lost at any time."""

    def __init__(self, patterns: Sequence[Pattern], queue_names: Sequence[str], *, aging_seconds: float = 0.0) -> None:
        self.turns = AgingTurns(aging_seconds)
        self.queues = list(queue_names)
        self._patterns = tuple(patterns)
        self._low = [0] * (RANKS * len(self.queues))
        self._walk: list[int] | None = None
        self._looked_at = -FULL_SCAN_SECONDS
        self._verdicts: dict[tuple[int, int], bool] = {}

    @property
    def is_walking(self) -> bool:
        """Whether the last read ended before the end of the queue."""
        return self._walk is not None

    def begin(self, now: float) -> list[int]:
        """For each rank of each queue, where to continue."""
        if self._walk is not None:
            return self._walk
        if now - self._looked_at >= FULL_SCAN_SECONDS:
            self._looked_at = now
            self._low = [0] * len(self._low)
        return list(self._low)

    def unknown(self, rows: Sequence[QueuedTask]) -> list[tuple[int, int]]:
        """Tasks whose names are not known yet."""
        return list(dict.fromkeys(key for row in rows if (key := (row.version_id, row.idx)) not in self._verdicts))

    def learn(self, named: Sequence[NamedTask]) -> None:
        if len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.clear()
        for each in named:
            address = address_of(each.dag, each.task)
            self._verdicts[each.version_id, each.idx] = any(matches(pattern, address) for pattern in self._patterns)

    def serves(self, row: QueuedTask) -> bool:
        """A task without a known name is not served."""
        return self._verdicts.get((row.version_id, row.idx), False)

    def note(self, begun: Sequence[int], rows: Sequence[QueuedTask], chosen: Sequence[QueuedTask]) -> None:
        """Advance past the rows that were read, but never past a matching one that still waits for a slot."""
        reached, is_cut = list(begun), False
        taken = {(row.place, row.seq) for row in chosen}
        for place, group in groupby(rows, key=lambda row: row.place):
            line = list(group)
            held = next((n for n, row in enumerate(line) if self.serves(row) and (place, row.seq) not in taken), None)
            for row in line[:held]:
                reached[place] = row.seq + 1
                if row.waited_seconds >= LAG_SECONDS:
                    self._low[place] = max(self._low[place], row.seq + 1)
            is_cut = is_cut or (held is None and len(line) == WINDOW)
        self._walk = reached if is_cut else None


async def exchange_matching(
    conn: AsyncConnection,
    matching: PatternClaims,
    *,
    session: int,
    reports: Sequence[str],
    free: int,
    infra_retries: int,
) -> Exchange:
    """As `step`, for a runner with patterns. `is_walking`: there are more rows to read."""
    done = Exchange(claims=[], refused=[], has_more=False)
    if reports:
        # Tasks that this makes available are for other runners as much as for this one: they are notified.
        done = await finish_and_claim(
            conn, session=session, reports=reports, queues=[], free=0, infra_retries=infra_retries
        )
    if free <= 0:
        return done
    begun, rows, chosen = await next_patterns(conn, matching, free)
    claims: list[ExchangeRow] = []
    if chosen:
        places, seqs = [row.place for row in chosen], [row.seq for row in chosen]
        claims = await claim_selected(conn, session=session, queues=matching.queues, places=places, seqs=seqs)
    matching.note(begun, rows, chosen)
    # If other runners were faster, more may follow: do not wait for the next tick.
    is_cut = matching.is_walking or len(claims) < len(chosen)
    is_walking = is_cut and len(claims) < free
    return replace(done, claims=claims, is_walking=is_walking)


async def next_patterns(
    conn: AsyncConnection, matching: PatternClaims, free: int
) -> tuple[list[int], list[QueuedTask], list[QueuedTask]]:
    """Where the read began, the rows, and the ones to claim."""
    now = time.monotonic()
    begun = matching.begin(now)
    rows = await runners.queued_tasks(conn, queues=matching.queues, begin=begun, window=WINDOW)
    if unknown := matching.unknown(rows):
        version_ids, idxs = [version for version, _ in unknown], [idx for _, idx in unknown]
        matching.learn(await runners.names(conn, version_ids=version_ids, idxs=idxs))
    mine = [row for row in rows if matching.serves(row)]
    return begun, rows, choose(mine, free, matching.turns.take(now))


def choose(rows: Sequence[QueuedTask], free: int, aging_seconds: float | None) -> list[QueuedTask]:
    """Up to `free` of the rows, which come by position and age; with an ageing, up to half of them for overdue ones."""
    first: list[QueuedTask] = []
    if aging_seconds is not None:
        heads: dict[int, QueuedTask] = {}
        for row in rows:
            heads.setdefault(row.place, row)
        late = overdue({place: row.waited_seconds for place, row in heads.items()}, aging_seconds)
        first = [heads[place] for place in late[: (free + 1) // 2]]
    return [*first, *(row for row in rows if row not in first)][:free]
