"""The instants of a backfill, in bounded batches and in either direction. These are the instants at which the schedule fires."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from evertick.domain.preview import fires_between, last_fires_between
from evertick.domain.schedule import ScheduleSpec

MOST_PARALLEL = 1000
_TICK = timedelta(microseconds=1)


class Reprocess(StrEnum):
    """Which instants that already have a run get another: none, those whose newest run failed or was canceled, or all."""

    NONE = "none"
    FAILED = "failed"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The next instants in order. `is_all`: no instant follows them."""

    instants: tuple[datetime, ...]
    is_all: bool


def next_batch(
    spec: ScheduleSpec, *, first: datetime, last: datetime, position: datetime | None, newest_first: bool, most: int
) -> Batch:
    """At most `most` instants of the inclusive range that follow `position` in the order of the backfill."""
    if newest_first:
        found = last_fires_between(spec, first, last if position is None else position - _TICK, most + 1)
    else:
        found = fires_between(spec, first if position is None else position + _TICK, last, most + 1)
    return Batch(instants=tuple(found[:most]), is_all=len(found) <= most)
