"""Business days: a calendar of closed days, and a cron schedule that is moved off them.

Pure: the days of a calendar are part of it. Where they come from is `sdk/calendars.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import StrEnum

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.cron import Cron, parse_cron
from evertick.domain.schedules.time_zones import find_zone, first_instant

WEEKEND = frozenset({5, 6})
# No calendar is closed for longer; and no schedule waits for longer for a day that fits.
LONGEST_CLOSED, LONGEST_SEARCH = timedelta(days=31), timedelta(days=366 * 5)
_DAY, _TICK = timedelta(days=1), timedelta(microseconds=1)
_MOST_NTH = 23


class Roll(StrEnum):
    """Where a fire goes that falls on a closed day: to the next open day, to the one before, or nowhere."""

    FORWARD = "forward"
    BACK = "back"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """`closed`: the days on which nothing happens, besides the `weekend` (Monday is 0)."""

    name: str
    closed: frozenset[date] = frozenset()
    weekend: frozenset[int] = WEEKEND

    def is_open(self, day: date) -> bool:
        return day.weekday() not in self.weekend and day not in self.closed

    def roll(self, day: date, how: Roll) -> date | None:
        """The day itself if it is open."""
        if self.is_open(day):
            return day
        if how is Roll.SKIP:
            return None
        step = _DAY if how is Roll.FORWARD else -_DAY
        for _ in range(LONGEST_CLOSED.days):
            day += step
            if self.is_open(day):
                return day
        raise InvalidSchedule(f"calendar {self.name!r} is closed for more than {LONGEST_CLOSED.days} days at {day}.")

    def nth_open_day(self, year: int, month: int, n: int) -> date | None:
        """The nth open day of the month; from its end if n is negative."""
        first = date(year, month, 1)
        days = [first + timedelta(days=number) for number in range(31)]
        found = [day for day in days if day.month == month and self.is_open(day)]
        place = n - 1 if n > 0 else n
        return found[place] if -len(found) <= place < len(found) else None

    def __or__(self, other: Calendar) -> Calendar:
        """Open when both are."""
        return Calendar(
            name=f"{self.name} and {other.name}",
            closed=self.closed | other.closed,
            weekend=self.weekend | other.weekend,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarSchedule:
    """A cron expression on the open days of a calendar. `nth`: only on the nth open day of a month."""

    expression: str
    calendar: Calendar
    roll: Roll = Roll.SKIP
    nth: int | None = None

    @property
    def words(self) -> str:
        moved = {Roll.FORWARD: "moved to the next", Roll.BACK: "moved to the one before", Roll.SKIP: "left out"}
        days = "open days" if self.nth is None else f"open day {self.nth} of the month"
        rule = "" if self.nth is not None else f", closed days {moved[self.roll]}"
        return f"{self.expression} on {days} of {self.calendar.name}{rule}"

    @property
    def state(self) -> str:
        """Changes with everything that decides an instant."""
        closed = ",".join(sorted(day.isoformat() for day in self.calendar.closed))
        text = f"{self.words}\0{sorted(self.calendar.weekend)}\0{closed}"
        return hashlib.sha256(text.encode()).hexdigest()

    def next_after(self, instant: datetime, timezone: str) -> datetime | None:
        """The first fire after the instant. Two that are moved to the same time are one."""
        cron = parse_cron(self.expression, timezone)
        best: datetime | None = None
        for planned in _fires(cron, instant - LONGEST_CLOSED, instant + LONGEST_SEARCH):
            if best is not None and planned - LONGEST_CLOSED > best:
                break
            moved = self._moved(planned, timezone)
            if moved is not None and moved > instant and (best is None or moved < best):
                best = moved
                if self.roll is not Roll.BACK:
                    break
        return best

    def _moved(self, planned: datetime, timezone: str) -> datetime | None:
        local = planned.astimezone(find_zone(timezone))
        day = local.date()
        if self.nth is not None:
            return planned if self.calendar.nth_open_day(day.year, day.month, self.nth) == day else None
        to = self.calendar.roll(day, self.roll)
        if to is None or to == day:
            return None if to is None else planned
        return first_instant(timezone, datetime.combine(to, local.time()))


def _fires(cron: Cron, after: datetime, until: datetime) -> Iterator[datetime]:
    at: datetime | None = after
    while at is not None and (at := cron.next_after(at)) is not None and at <= until:
        yield at


def on_calendar(
    expression: str, calendar: Calendar, *, roll: Roll | str = Roll.SKIP, nth: int | None = None
) -> CalendarSchedule:
    """A cron schedule on the open days of a calendar: `schedule=on_calendar("0 9 * * *", country("DE"), roll="forward")`.

    `roll`: a fire on a closed day moves to the next open day ("forward"), to the one before ("back"), or is left out ("skip").
    `nth`: only on the nth open day of each month, counted from its end if negative.
    """
    if not isinstance(calendar, Calendar):
        raise InvalidSchedule(
            f"on_calendar: {calendar!r:.60} is not a calendar: use country(...), calendar(...) or Calendar"
        )
    try:
        how = Roll(roll)
    except ValueError:
        raise InvalidSchedule(f"on_calendar: roll is {roll!r:.40}: use {', '.join(Roll)}") from None
    if nth is not None and (isinstance(nth, bool) or not isinstance(nth, int) or not 1 <= abs(nth) <= _MOST_NTH):
        raise InvalidSchedule(f"on_calendar: nth is {nth!r:.20}: use 1 to {_MOST_NTH}, or -1 to -{_MOST_NTH}")
    if nth is not None and how is not Roll.SKIP:
        raise InvalidSchedule("on_calendar: nth names open days, so nothing is left to roll: leave roll out")
    if len(calendar.weekend) > 6 or not calendar.weekend <= frozenset(range(7)):
        raise InvalidSchedule(f"calendar {calendar.name!r}: weekend must leave a day open")
    parse_cron(expression, "UTC")
    return CalendarSchedule(expression=expression, calendar=calendar, roll=how, nth=nth)
