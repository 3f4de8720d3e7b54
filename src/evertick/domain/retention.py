"""Retention: which old rows may be deleted, and how slowly, so that deleting never delays the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

# An id is drawn a moment before its row is visible, so rows may be out of order by as long as a transaction lasts.
ORDER_MARGIN = timedelta(minutes=1)

# The share of time spent deleting is at most this (with two cores, 10 % costs 7 % of the throughput, 5 % costs 4 %); a fifth
# of it while other work is late.
SHARE = 0.05
SHARE_WHILE_BEHIND = 0.01
# A step that was slow because it waited says little about how busy the database is.
LONGEST_REST_SECONDS = 60.0
# A batch that takes longer than this was too large; after one that takes less than a third of it, the size may grow.
LONGEST_BATCH_SECONDS = 0.05
FIRST_BATCH, LARGEST_BATCH = 50, 500
# The average number of task, log and result rows per run in a batch.
ROWS_PER_RUN = 5


@dataclass(frozen=True, slots=True)
class Dated:
    """One row on a walk in id order. `ended_at` is None while it is open."""

    id: int
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The rows to delete, how far the walk came, and whether only young rows follow."""

    ids: list[int]
    last: int
    is_end: bool


def choose(seen: Sequence[Dated], *, after: int, before: datetime, now: datetime) -> Chosen:
    """From rows in id order, choose rows that ended before `before`.

    The walk ends at the first young row. A row dated in the future is ignored: a clock was wrong, and a walk that stopped
    there would never get past it.
    """
    last = after
    ids: list[int] = []
    for each in seen:
        if before + ORDER_MARGIN <= each.created_at <= now:
            return Chosen(ids=ids, last=last, is_end=True)
        last = each.id
        if each.ended_at is not None and each.ended_at < before:
            ids.append(each.id)
    return Chosen(ids=ids, last=last, is_end=not seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much is deleted at once. Adapts to the current speed of the database."""

    batch: int = FIRST_BATCH

    @property
    def rows(self) -> int:
        return self.batch * ROWS_PER_RUN

    def after(self, seconds: float) -> Pace:
        """The pace after a batch that took this long."""
        if seconds > LONGEST_BATCH_SECONDS:
            return replace(self, batch=max(1, self.batch // 2))
        if seconds < LONGEST_BATCH_SECONDS / 3:
            return replace(self, batch=min(LARGEST_BATCH, self.batch + self.batch // 2 + 1))
        return self


def rest_seconds(seconds: float, *, is_behind: bool) -> float:
    """How long to pause after a batch that took this long."""
    share = SHARE_WHILE_BEHIND if is_behind else SHARE
    return min(seconds * (1 / share - 1), LONGEST_REST_SECONDS)
