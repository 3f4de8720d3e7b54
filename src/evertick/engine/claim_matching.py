"""claim for a runner that serves only tasks that match patterns: it reads the queue, and claims matching rows by position.

The queue is the same for all runners, so that others pay nothing. Each row is read about once: skipped rows are
remembered, and a name is matched once per version. Two round trips instead of one; only the claim decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from psycopg import AsyncConnection

from evertick.domain.fairness import RANKS, overdue
from evertick.domain.patterns import Pattern, address_of, matches
from evertick.engine.fair_turns import FairTurns
from evertick.engine.step import Stepped, step
from evertick.store import queues, tasks
from evertick.store.db import retry_on_deadlock
from evertick.store.queues import InLine, NamedTask
from evertick.store.tasks import StepRow

WINDOW = 500
# A position in the queue is assigned before the transaction that fills it commits, so a row may appear before others that were
# read earlier. Almost no transaction outlasts this; a full scan finds the rest, and rows that their claimer released.
LAG_SECONDS = 2.0
FULL_LOOK_SECONDS = 60.0
MOST_VERDICTS = 500_000


class Matching:
    """One runner's state: which tasks it serves, and how far it has read each queue. May be lost at any time."""

    def __init__(self, patterns: Sequence[Pattern], queue_names: Sequence[str], *, aging_seconds: float = 0.0) -> None:
        self.turns = FairTurns(aging_seconds)
        self.queues = list(queue_names)
        self._patterns = tuple(patterns)
        self._low = [0] * (RANKS * len(self.queues))
        self._walk: list[int] | None = None
        self._looked_at = -FULL_LOOK_SECONDS
        self._verdicts: dict[tuple[int, int], bool] = {}

    @property
    def is_walking(self) -> bool:
        """Whether the last read ended before the end of the queue."""
        return self._walk is not None

    def begin(self, now: float) -> list[int]:
        """For each rank of each queue, where to continue."""
        if self._walk is not None:
            return self._walk
        if now - self._looked_at >= FULL_LOOK_SECONDS:
            self._looked_at = now
            self._low = [0] * len(self._low)
        return list(self._low)

    def unknown(self, rows: Sequence[InLine]) -> list[tuple[int, int]]:
        """Tasks whose names are not known yet."""
        return list(dict.fromkeys(key for row in rows if (key := (row.version_id, row.idx)) not in self._verdicts))

    def learn(self, named: Sequence[NamedTask]) -> None:
        if len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.clear()
        for each in named:
            address = address_of(each.dag, each.task)
            self._verdicts[each.version_id, each.idx] = any(matches(pattern, address) for pattern in self._patterns)

    def serves(self, row: InLine) -> bool:
        """A task without a known name is not served."""
        return self._verdicts.get((row.version_id, row.idx), False)

    def note(self, begun: Sequence[int], rows: Sequence[InLine], chosen: Sequence[InLine]) -> None:
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


async def step_matching(
    conn: AsyncConnection,
    matching: Matching,
    *,
    session: int,
    reports: Sequence[str],
    free: int,
    infra_retries: int,
) -> Stepped:
    """As `step`, for a runner with patterns. `is_walking`: there are more rows to read."""
    done = Stepped(claims=[], refused=[], has_more=False)
    if reports:
        # Tasks that this makes available are for other runners as much as for this one: they are notified.
        none: list[str] = []
        done = await step(conn, session=session, reports=reports, queues=none, free=0, infra_retries=infra_retries)
    if free <= 0:
        return done
    begun, rows, chosen = await look_for(conn, matching, free)
    claims = await _claim(conn, matching, session, chosen) if chosen else []
    matching.note(begun, rows, chosen)
    # If other runners were faster, more may follow: do not wait for the next tick.
    is_cut = matching.is_walking or len(claims) < len(chosen)
    is_walking = is_cut and len(claims) < free
    return Stepped(claims=claims, refused=done.refused, has_more=done.has_more, is_walking=is_walking)


async def look_for(
    conn: AsyncConnection, matching: Matching, free: int
) -> tuple[list[int], list[InLine], list[InLine]]:
    """Where the read began, the rows, and the ones to claim."""
    now = time.monotonic()
    begun = matching.begin(now)
    rows = await queues.look_in_line(conn, queues=matching.queues, begin=begun, window=WINDOW)
    if unknown := matching.unknown(rows):
        matching.learn(await queues.names(conn, unknown))
    mine = [row for row in rows if matching.serves(row)]
    return begun, rows, choose(mine, free, matching.turns.take(now))


def choose(rows: Sequence[InLine], free: int, aging_seconds: float | None) -> list[InLine]:
    """Up to `free` of the rows, which come by position and age; with an ageing, up to half of them for overdue ones."""
    first: list[InLine] = []
    if aging_seconds is not None:
        heads: dict[int, InLine] = {}
        for row in rows:
            heads.setdefault(row.place, row)
        late = overdue({place: row.waited_seconds for place, row in heads.items()}, aging_seconds)
        first = [heads[place] for place in late[: (free + 1) // 2]]
    return [*first, *(row for row in rows if row not in first)][:free]


async def _claim(conn: AsyncConnection, matching: Matching, session: int, chosen: Sequence[InLine]) -> list[StepRow]:
    places, seqs = [row.place for row in chosen], [row.seq for row in chosen]
    return await retry_on_deadlock(
        lambda: tasks.claim_rows(conn, session=session, queues=matching.queues, places=places, seqs=seqs)
    )
