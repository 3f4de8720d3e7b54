"""What a schedule will do, or would have done: its fires between two instants, day by day, and at each change of the clock.

Asks the arithmetic that fires (`next_after`, `count_between`) and has none of its own: what is shown here is what happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum

from evertick.domain.cron import LONGEST_GAP_SECONDS
from evertick.domain.misfire import count_between, latest_between
from evertick.domain.schedule import ScheduleKind, ScheduleSpec, next_after
from evertick.domain.zones import EPOCH, first_instant, from_seconds, regime_at, to_seconds

_TICK = timedelta(microseconds=1)
_SHOWN_WALLS = 3


class ChangeEffect(StrEnum):
    """What a change of the clock does to a schedule."""

    NOTHING_DUE = "nothing_due"  # no fire falls into what is missing or repeated
    RUNS_AFTER = "runs_after"  # what never happens on the clock fires once, right after the gap
    SKIPPED = "skipped"  # what never happens on the clock does not fire
    FIRST_ONLY = "first_only"  # what happens twice fires at its first copy
    BOTH = "both"  # what happens twice fires twice
    REAL_TIME = "real_time"  # it counts elapsed time and does not look at the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """`at` is the first instant of the new offset. Walls are what the clock shows, without a zone."""

    at: datetime
    offset_before: timedelta
    offset_after: timedelta

    @property
    def wall_before(self) -> datetime:
        """What the clock would show at that instant, had it not been changed."""
        return (self.at + self.offset_before).replace(tzinfo=None)

    @property
    def wall_after(self) -> datetime:
        return (self.at + self.offset_after).replace(tzinfo=None)

    @property
    def shift(self) -> timedelta:
        return self.offset_after - self.offset_before

    @property
    def is_gap(self) -> bool:
        """Put forward: some wall times never happen. Otherwise it is put back, and some happen twice."""
        return self.offset_after > self.offset_before


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeOutcome:
    """`walls` are the first few of the `wall_count` wall times that the change touches, `fires` what they give."""

    change: ClockChange
    effect: ChangeEffect
    walls: tuple[datetime, ...] = ()
    wall_count: int = 0
    fires: tuple[datetime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DayCount:
    """`is_missing`: a day that the calendar of the zone left out."""

    day: date
    count: int
    is_missing: bool = False


def fires_between(spec: ScheduleSpec, first: datetime, last: datetime, limit: int) -> list[datetime]:
    """The first fires from `first` to `last`, with both; at most `limit`."""
    fires: list[datetime] = []
    due = next_after(spec, first - _TICK)
    while due is not None and due <= last and len(fires) < limit:
        fires.append(due)
        due = next_after(spec, due)
    return fires


def last_fires_between(spec: ScheduleSpec, first: datetime, last: datetime, limit: int) -> list[datetime]:
    """The same from the other end: the latest one first."""
    fires: list[datetime] = []
    due = latest_between(spec, first - _TICK, last)
    while due is not None and len(fires) < limit:
        fires.append(due)
        due = latest_between(spec, first - _TICK, due - _TICK)
    return fires


def count_fires(spec: ScheduleSpec, first: datetime, last: datetime) -> int:
    """How many there are from `first` to `last`, with both, without visiting each."""
    return count_between(spec, first - _TICK, last)


def clock_changes(zone: str, first: datetime, last: datetime) -> Iterator[ClockChange]:
    """Every change of the zone's clock from `first` to `last`, with both."""
    begin, end = to_seconds(first), to_seconds(last)
    regime = regime_at(zone, begin)
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
        regime = regime_at(zone, regime.end)


def outcome_of(spec: ScheduleSpec, change: ClockChange) -> ChangeOutcome:
    """What the change does to the schedule, told by which instants fire."""
    if spec.kind is not ScheduleKind.CRON:
        return ChangeOutcome(change=change, effect=ChangeEffect.REAL_TIME)
    begin, end = sorted((change.wall_before, change.wall_after))
    walls = list(_walls_between(spec, begin, end, limit=_SHOWN_WALLS))
    count = spec.cron.fields.count_walls(_wall_seconds(begin), _wall_seconds(end))
    fires: tuple[datetime, ...]
    if not walls:
        return ChangeOutcome(change=change, effect=ChangeEffect.NOTHING_DUE)
    if change.is_gap:
        # After a longer gap the expression may name that very instant itself: it fires then, but not for what was skipped.
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
    """How often it fires on each day of its zone; the first and the last day only as far as the range goes."""
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
    """Matching wall times from `first` until before `before`."""
    wall, end = spec.cron.fields.next_wall(_wall_seconds(first)), _wall_seconds(before)
    while wall is not None and wall < end and limit:
        yield (EPOCH + timedelta(seconds=wall)).replace(tzinfo=None)
        wall, limit = spec.cron.fields.next_wall(wall + 1), limit - 1


def _wall_seconds(wall: datetime) -> int:
    return to_seconds(wall.replace(tzinfo=UTC))


def _local_day(zone: str, instant: datetime) -> date:
    offset = regime_at(zone, to_seconds(instant)).offset
    return (instant + timedelta(seconds=offset)).date()


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day)
