"""A preview of a schedule: its fires between two instants, the effect of each clock change, and the batches of a backfill.

Uses the same functions that fire (`next_after`, `count_between`), so that the preview always agrees with the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from evertick.domain.schedules.cron import LONGEST_GAP_SECONDS
from evertick.domain.schedules.misfire import count_between, latest_between
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, next_after
from evertick.domain.schedules.time_zones import EPOCH, first_instant, from_seconds, period_at, to_seconds

_TICK = timedelta(microseconds=1)


_SHOWN_WALLS = 3


class ChangeEffect(StrEnum):
    """The effect of a clock change on a schedule."""

    NOTHING_DUE = "nothing_due"  # no fire is in the skipped or repeated time
    RUNS_AFTER = "runs_after"  # skipped wall times fire once, right after the gap
    SKIPPED = "skipped"  # skipped wall times do not fire
    FIRST_ONLY = "first_only"  # a repeated wall time fires at its first occurrence
    BOTH = "both"  # a repeated wall time fires twice
    REAL_TIME = "real_time"  # it counts elapsed time and ignores the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """`at` is the first instant of the new offset. Walls are wall-clock times, without a zone."""

    at: datetime
    offset_before: timedelta
    offset_after: timedelta

    @property
    def wall_before(self) -> datetime:
        """The wall time at that instant, had the clock not changed."""
        return (self.at + self.offset_before).replace(tzinfo=None)

    @property
    def wall_after(self) -> datetime:
        return (self.at + self.offset_after).replace(tzinfo=None)

    @property
    def shift(self) -> timedelta:
        return self.offset_after - self.offset_before

    @property
    def is_gap(self) -> bool:
        """The clock moves forward and skips wall times. Otherwise it moves back and repeats some."""
        return self.offset_after > self.offset_before


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOutcome:
    """`walls` are the first few of the `wall_count` wall times that the change affects, `fires` the resulting fires."""

    change: ClockChange
    effect: ChangeEffect
    walls: tuple[datetime, ...] = ()
    wall_count: int = 0
    fires: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DayCount:
    """`is_missing`: a day that the zone's calendar skipped."""

    day: date
    count: int
    is_missing: bool = False


def fires_between(spec: ScheduleSpec, first: datetime, last: datetime, limit: int) -> list[datetime]:
    """The first fires from `first` to `last`, inclusive; at most `limit`."""
    fires: list[datetime] = []
    due = next_after(spec, first - _TICK)
    while due is not None and due <= last and len(fires) < limit:
        fires.append(due)
        due = next_after(spec, due)
    return fires


def last_fires_between(spec: ScheduleSpec, first: datetime, last: datetime, limit: int) -> list[datetime]:
    """The last fires from `first` to `last`, the latest first; at most `limit`."""
    fires: list[datetime] = []
    due = latest_between(spec, first - _TICK, last)
    while due is not None and len(fires) < limit:
        fires.append(due)
        due = latest_between(spec, first - _TICK, due - _TICK)
    return fires


def count_fires(spec: ScheduleSpec, first: datetime, last: datetime) -> int:
    """The number of fires from `first` to `last`, inclusive, without visiting each."""
    return count_between(spec, first - _TICK, last)


def clock_changes(zone: str, first: datetime, last: datetime) -> Iterator[ClockChange]:
    """Every change of the zone's clock from `first` to `last`, inclusive."""
    begin, end = to_seconds(first), to_seconds(last)
    regime = period_at(zone, begin)
    while True:
        is_change = regime.changed_at == regime.start and regime.offset != regime.offset_before
        at = from_seconds(regime.start)
        if is_change and at is not None and first <= at:
            yield ClockChange(
                at=at,
                offset_before=timedelta(seconds=regime.offset_before),
                offset_after=timedelta(seconds=regime.offset),
            )
        if regime.end > end:
            return
        regime = period_at(zone, regime.end)


def outcome_of(spec: ScheduleSpec, change: ClockChange) -> ChangeOutcome:
    """The effect of the change on the schedule, derived from the instants that fire."""
    if spec.kind is not ScheduleKind.CRON:
        return ChangeOutcome(change=change, effect=ChangeEffect.REAL_TIME)
    begin, end = sorted((change.wall_before, change.wall_after))
    walls = list(_walls_between(spec, begin, end, limit=_SHOWN_WALLS))
    count = spec.cron.fields.count_walls(_wall_seconds(begin), _wall_seconds(end))
    fires: tuple[datetime, ...]
    if not walls:
        return ChangeOutcome(change=change, effect=ChangeEffect.NOTHING_DUE)
    if change.is_gap:
        # After a longer gap the expression may match that very instant: it fires then, but not for the skipped times.
        is_short = change.shift <= timedelta(seconds=LONGEST_GAP_SECONDS)
        moved = is_short and not spec.cron.fields.is_elapsed and is_fire(spec, change.at)
        effect = ChangeEffect.RUNS_AFTER if moved else ChangeEffect.SKIPPED
        fires = (change.at,) if moved else ()
    else:
        first = (wall.replace(tzinfo=UTC) - change.offset_before for wall in walls)
        again = (wall.replace(tzinfo=UTC) - change.offset_after for wall in walls)
        fires = tuple(at for at in (*first, *again) if is_fire(spec, at))
        effect = ChangeEffect.BOTH if any(at >= change.at for at in fires) else ChangeEffect.FIRST_ONLY
    return ChangeOutcome(change=change, effect=effect, walls=tuple(walls), wall_count=count, fires=fires)


def is_fire(spec: ScheduleSpec, instant: datetime) -> bool:
    return next_after(spec, instant - _TICK) == instant


def days_between(spec: ScheduleSpec, first: datetime, last: datetime) -> Iterator[DayCount]:
    """The number of fires on each day of its zone; the first and the last day are cut at the ends of the range."""
    day, end_day = _local_day(spec.timezone, first), _local_day(spec.timezone, last)
    begin = first_instant(spec.timezone, _midnight(day))
    while day <= end_day:
        following = day + timedelta(days=1)
        end = first_instant(spec.timezone, _midnight(following))
        assert begin is not None and end is not None, "both lie before the end of the last year"
        count = count_between(spec, max(begin, first) - _TICK, min(end - _TICK, last))
        yield DayCount(day=day, count=count, is_missing=begin == end)
        day, begin = following, end


def _walls_between(spec: ScheduleSpec, first: datetime, before: datetime, limit: int) -> Iterator[datetime]:
    """Matching wall times from `first` to `before`, exclusive."""
    wall, end = spec.cron.fields.next_wall(_wall_seconds(first)), _wall_seconds(before)
    while wall is not None and wall < end and limit:
        yield (EPOCH + timedelta(seconds=wall)).replace(tzinfo=None)
        wall, limit = spec.cron.fields.next_wall(wall + 1), limit - 1


def _wall_seconds(wall: datetime) -> int:
    return to_seconds(wall.replace(tzinfo=UTC))


def _local_day(zone: str, instant: datetime) -> date:
    offset = period_at(zone, to_seconds(instant)).offset
    return (instant + timedelta(seconds=offset)).date()


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day)


MOST_PARALLEL = 1000


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
