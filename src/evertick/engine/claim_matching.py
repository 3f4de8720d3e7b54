"""claim for a runner that serves only tasks of some names: it looks along the line, and claims by their places what is its own.

The line is the same for all, so that other runners pay nothing. Each row is looked at about once: what was passed over is
remembered, and a name is matched once per version. Two round trips instead of one; the claim stays the only decision.
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
# A place in line is given before the transaction that fills it commits, so that one may appear before others that were seen
# already. Almost no transaction outlasts this; a look at everything finds what does, or what its claimer let go of.
LAG_SECONDS = 2.0
FULL_LOOK_SECONDS = 60.0
MOST_VERDICTS = 500_000


class Matching:
    """One runner's: which tasks it serves, and how far along the lines it has looked. May be lost at any time."""

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
        """Whether the last look ended before the line did."""
        return self._walk is not None

    def begin(self, now: float) -> list[int]:
        """For each rank of each queue, where to look next."""
        if self._walk is not None:
            return self._walk
        if now - self._looked_at >= FULL_LOOK_SECONDS:
            self._looked_at = now
            self._low = [0] * len(self._low)
        return list(self._low)

    def unknown(self, rows: Sequence[InLine]) -> list[tuple[int, int]]:
        """Tasks that were never met before."""
        return list(dict.fromkeys(key for row in rows if (key := (row.version_id, row.idx)) not in self._verdicts))

    def learn(self, named: Sequence[NamedTask]) -> None:
        if len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.clear()
        for each in named:
            address = address_of(each.dag, each.task)
            self._verdicts[each.version_id, each.idx] = any(matches(pattern, address) for pattern in self._patterns)

    def serves(self, row: InLine) -> bool:
        """What could not be named is not ours."""
        return self._verdicts.get((row.version_id, row.idx), False)

    def note(self, begun: Sequence[int], rows: Sequence[InLine], chosen: Sequence[InLine]) -> None:
        """Go on behind what was looked at, but never past one of ours that still waits for a slot."""
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
    """As `step`, for a runner of some names. `is_walking`: there is more of the line to look at."""
    done = Stepped(claims=[], refused=[], has_more=False)
    if reports:
        # What this makes available is for others as much as for us: they are told.
        none: list[str] = []
        done = await step(conn, session=session, reports=reports, queues=none, free=0, infra_retries=infra_retries)
    if free <= 0:
        return done
    begun, rows, chosen = await look_for(conn, matching, free)
    claims = await _claim(conn, matching, session, chosen) if chosen else []
    matching.note(begun, rows, chosen)
    # Where others were faster there may be more behind: that is no reason to wait for the next tick.
    is_cut = matching.is_walking or len(claims) < len(chosen)
    is_walking = is_cut and len(claims) < free
    return Stepped(claims=claims, refused=done.refused, has_more=done.has_more, is_walking=is_walking)


async def look_for(
    conn: AsyncConnection, matching: Matching, free: int
) -> tuple[list[int], list[InLine], list[InLine]]:
    """Where the look began, what it saw, and what of that is worth claiming."""
    now = time.monotonic()
    begun = matching.begin(now)
    rows = await queues.look_in_line(conn, queues=matching.queues, begin=begun, window=WINDOW)
    if unknown := matching.unknown(rows):
        matching.learn(await queues.names(conn, unknown))
    mine = [row for row in rows if matching.serves(row)]
    return begun, rows, choose(mine, free, matching.turns.take(now))


def choose(rows: Sequence[InLine], free: int, aging_seconds: float | None) -> list[InLine]:
    """Up to `free` of the rows, which come by place and age; with an ageing, up to half of them for those that are overdue."""
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
