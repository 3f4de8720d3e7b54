"""Retention: which of the old things may go, and how slowly, so that nobody who works has to wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

# An id is drawn a moment before its row can be seen, so that neighbours may be out of order by as long as a transaction lasts.
ORDER_MARGIN = timedelta(minutes=1)

# Of the time at most this share is spent deleting (of two cores a tenth cost 7 % of the throughput, a twentieth 4 %); while
# others are late, a fifth of that.
SHARE = 0.05
SHARE_WHILE_BEHIND = 0.01
# A step that took long because it waited says little about how busy the database is.
LONGEST_REST_SECONDS = 60.0
# A batch that takes longer than this was too large; one that takes less than a third of it may grow.
LONGEST_BATCH_SECONDS = 0.05
FIRST_BATCH, LARGEST_BATCH = 50, 500
# So many rows of tasks, logs and results belong to a run in a batch on average.
ROWS_PER_RUN = 5


@dataclass(frozen=True, slots=True)
class Dated:
    """One thing met on a walk in the order of ids. `ended_at` is None while it is open."""

    id: int
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What may go, how far the walk came, and whether only young ones follow."""

    ids: list[int]
    last: int
    is_end: bool


def choose(seen: Sequence[Dated], *, after: int, before: datetime, now: datetime) -> Chosen:
    """Of things in the order of their ids, those that ended before `before`.

    The walk ends at the first young one. One that says to be of the future says nothing: a clock was wrong, and whoever
    stopped there would stop for ever.
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
    """How much is deleted at once. Follows what the database can do now."""

    batch: int = FIRST_BATCH

    @property
    def rows(self) -> int:
        return self.batch * ROWS_PER_RUN

    def after(self, seconds: float) -> Pace:
        """The pace once a batch took so long."""
        if seconds > LONGEST_BATCH_SECONDS:
            return replace(self, batch=max(1, self.batch // 2))
        if seconds < LONGEST_BATCH_SECONDS / 3:
            return replace(self, batch=min(LARGEST_BATCH, self.batch + self.batch // 2 + 1))
        return self


def rest_seconds(seconds: float, *, is_behind: bool) -> float:
    """How long to leave the database alone after it was busy with us for so long."""
    share = SHARE_WHILE_BEHIND if is_behind else SHARE
    return min(seconds * (1 / share - 1), LONGEST_REST_SECONDS)
