"""When a cron expression fires in real time. Never reads the clock, never searches without a bound.

The daylight-saving rule. An hour field that starts with `*` makes a schedule *elapsed*: it fires at every real instant
whose wall clock matches. Any other is *calendar*: each matching wall time fires once, a repeated one at its first occurrence;
the matches skipped by a gap of up to 3 hours fire once, right after the gap; a longer gap is skipped and recorded.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.time_zones import OffsetPeriod, find_zone, from_seconds, period_at, to_seconds

_DAY_SECONDS = 86_400


_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()


_FIRST_WALL = (date.min.toordinal() - _EPOCH_ORDINAL) * _DAY_SECONDS


_LAST_DAY = date.max.toordinal() - _EPOCH_ORDINAL


# The Gregorian calendar, weekdays included, repeats every 400 years.
_MONTHS_IN_400_YEARS = 4_800


_EVERY_WEEK = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28


_LAST = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CronFields:
    """Numbers are bit sets: bit n is set if n matches. Weekday 0 is Sunday; nth weekday (5, 0) is the last Friday."""

    seconds: int
    minutes: int
    hours: int
    days: int
    has_last_day: bool
    has_last_workday: bool
    months: int
    weekdays: int
    nth_weekdays: tuple[tuple[int, int], ...]
    needs_both_days: bool
    is_elapsed: bool

    def next_wall(self, wall: int) -> int | None:
        """The first matching wall time at or after `wall`, or None if there is none before the year 10000."""
        day, second = divmod(max(wall, _FIRST_WALL), _DAY_SECONDS)
        matching = self._next_day(day)
        if matching == day:
            later = self._next_second(second)
            if later is not None:
                return day * _DAY_SECONDS + later
            matching = self._next_day(day + 1)
        if matching is None:
            return None
        return matching * _DAY_SECONDS + _lowest(self.hours) * 3600 + _lowest(self.minutes) * 60 + _lowest(self.seconds)

    def count_walls(self, begin: int, end: int) -> int:
        """The number of matching wall times from `begin` to `end`, exclusive. Costs a few microseconds per matching day."""
        if end <= begin:
            return 0
        first_day, first_second = divmod(max(begin, _FIRST_WALL), _DAY_SECONDS)
        last_day, last_second = divmod(end, _DAY_SECONDS)
        days, day = 0, self._next_day(first_day)
        cut = self._seconds_before(first_second) if day == first_day else 0
        while day is not None and day < last_day:
            days, day = days + 1, self._next_day(day + 1)
        rest = self._seconds_before(last_second) if day == last_day else 0
        return days * self.hours.bit_count() * self.minutes.bit_count() * self.seconds.bit_count() - cut + rest

    def _next_day(self, day: int) -> int | None:
        """The first matching day at or after `day`, both as days since 1970-01-01."""
        if day > _LAST_DAY:
            return None
        start = date.fromordinal(day + _EPOCH_ORDINAL)
        year, month, first = start.year, start.month, start.day
        for _ in range(_MONTHS_IN_400_YEARS + 1):
            if self.months >> month & 1 and (days := self._days_of(year, month) >> first):
                return date(year, month, first + _lowest(days)).toordinal() - _EPOCH_ORDINAL
            month, first = month + 1, 1
            if month > 12:
                year, month = year + 1, 1
                if year > date.max.year:
                    return None
        return None

    def _days_of(self, year: int, month: int) -> int:
        """The set of matching days in one month."""
        first_weekday, length = _month(year, month)
        month_days = (2 << length) - 2
        days = self.days
        if self.has_last_day:
            days |= 1 << length
        if self.has_last_workday:
            last_weekday = (first_weekday + length - 1) % 7
            days |= 1 << length - {6: 1, 0: 2}.get(last_weekday, 0)
        turned = self.weekdays >> first_weekday | self.weekdays << 7 - first_weekday
        by_weekday = (turned & 0x7F) * _EVERY_WEEK << 1
        for weekday, nth in self.nth_weekdays:
            first = 1 + (weekday - first_weekday) % 7
            by_weekday |= 1 << first + 7 * (nth - 1 if nth != _LAST else (length - first) // 7)
        return (days & by_weekday if self.needs_both_days else days | by_weekday) & month_days

    def _next_second(self, second: int) -> int | None:
        """The first matching second of the day at or after `second`."""
        hour, rest = divmod(second, 3600)
        minute, second = divmod(rest, 60)
        if self.hours >> hour & 1:
            if self.minutes >> minute & 1 and (seconds := self.seconds >> second):
                return hour * 3600 + minute * 60 + second + _lowest(seconds)
            if minutes := self.minutes >> minute + 1:
                return hour * 3600 + (minute + 1 + _lowest(minutes)) * 60 + _lowest(self.seconds)
        if hours := self.hours >> hour + 1:
            return (hour + 1 + _lowest(hours)) * 3600 + _lowest(self.minutes) * 60 + _lowest(self.seconds)
        return None

    def _seconds_before(self, second: int) -> int:
        """The number of matching seconds before `second` on a matching day."""
        hour, rest = divmod(second, 3600)
        minute, second = divmod(rest, 60)
        minutes = _count_below(self.hours, hour) * self.minutes.bit_count()
        if not self.hours >> hour & 1:
            return minutes * self.seconds.bit_count()
        minutes += _count_below(self.minutes, minute)
        return minutes * self.seconds.bit_count() + (self.minutes >> minute & 1) * _count_below(self.seconds, second)


@lru_cache(maxsize=1024)
def _month(year: int, month: int) -> tuple[int, int]:
    """The weekday of its first day, and its length."""
    monday_based, length = calendar.monthrange(year, month)
    return (monday_based + 1) % 7, length


def _lowest(members: int) -> int:
    return (members & -members).bit_length() - 1


def _count_below(members: int, value: int) -> int:
    return (members & (1 << value) - 1).bit_count()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def parse(self, terms: list[str]) -> int:
        """The set for the given values, ranges and steps; the `ValueError` of an invalid one says what is wrong."""
        members = 0
        for term in terms:
            for value in self._parse_term(term):
                members |= 1 << value
        return members

    def _parse_term(self, term: str) -> range:
        span, slash, step_text = term.partition("/")
        step = _number(step_text) if slash else 1
        if step < 1:
            raise ValueError(f"the step in {term!r} must be at least 1")
        if span == "*":
            return range(self.low, self.high + 1, step)
        first_text, dash, last_text = span.partition("-")
        first = self.parse_value(first_text)
        last = self.parse_value(last_text) if dash else self.high if slash else first
        if last == 0 < first and self.high == 7:
            last = 7  # a week may end with Sunday: MON-SUN
        if last < first:
            raise ValueError(f"the range {span!r} runs backwards: split it in two, as in 22-23,0-2 for hours")
        return range(first, last + 1, step)

    def parse_value(self, text: str) -> int:
        if text.upper() in self.names:
            return self.names.index(text.upper()) + self.low
        value = _number(text)
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} is not between {self.low} and {self.high}")
        return value


_MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")


_WEEKDAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


_SECOND = _Field(name="second", low=0, high=59)


_MINUTE = _Field(name="minute", low=0, high=59)


_HOUR = _Field(name="hour", low=0, high=23)


_DAY = _Field(name="day-of-month", low=1, high=31)


_MONTH = _Field(name="month", low=1, high=12, names=_MONTH_NAMES)


_WEEKDAY = _Field(name="day-of-week", low=0, high=7, names=_WEEKDAY_NAMES)


_FIELDS = (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)


def parse_fields(expression: str) -> CronFields:
    """Parse five or six fields. An error names the field and the expression."""
    texts = expression.split()
    if len(texts) not in (5, 6):
        raise InvalidSchedule(
            f"cron {expression!r} has {len(texts)} field(s): write 5 (minute hour day-of-month month day-of-week), or "
            "6 with the second first; other kinds are written '@every 30s' and '@once 2030-01-01T00:00:00Z'"
        )
    texts = texts if len(texts) == 6 else ["0", *texts]
    terms: list[list[str]] = []
    plain: list[int] = []
    nth_weekdays: list[tuple[int, int]] = []
    for field, text in zip(_FIELDS, texts, strict=True):
        terms.append(text.removeprefix("+" if field is _WEEKDAY else "").split(","))
        try:
            if field is _WEEKDAY:
                nth_weekdays = [_parse_nth(term) for term in terms[-1] if _is_nth(term)]
            plain.append(field.parse([term for term in terms[-1] if not _is_special(field, term)]))
        except ValueError as fault:
            raise InvalidSchedule(f"cron {expression!r}: the {field.name} field {text!r} is invalid: {fault}") from None
    return CronFields(
        seconds=plain[0],
        minutes=plain[1],
        hours=plain[2],
        days=plain[3],
        has_last_day="L" in map(str.upper, terms[3]),
        has_last_workday="LW" in map(str.upper, terms[3]),
        months=plain[4],
        weekdays=(plain[5] | plain[5] >> 7) & 0x7F,
        nth_weekdays=tuple(nth_weekdays),
        needs_both_days=texts[3].startswith("*") or texts[5].startswith(("*", "+")),
        is_elapsed=texts[2].startswith("*"),
    )


def _is_nth(term: str) -> bool:
    return "#" in term or term.endswith(("L", "l"))


def _is_special(field: _Field, term: str) -> bool:
    return _is_nth(term) if field is _WEEKDAY else field is _DAY and term.upper() in ("L", "LW")


def _parse_nth(term: str) -> tuple[int, int]:
    """`5#2`, the second Friday, or `5L`, the last one."""
    if term.endswith(("L", "l")):
        return _WEEKDAY.parse_value(term[:-1]) % 7, _LAST
    weekday, _, nth_text = term.partition("#")
    nth = _number(nth_text)
    if not 1 <= nth <= 5:
        raise ValueError(f"{term!r} must name the first to fifth weekday of a month: #1 to #5")
    return _WEEKDAY.parse_value(weekday) % 7, nth


def _number(text: str) -> int:
    if not text:
        raise ValueError("a value is missing")
    if not (text.isascii() and text.isdecimal() and len(text) <= 3):
        raise ValueError(f"{text!r} is not a number or name that this field accepts")
    return int(text)


_LONGEST_EXPRESSION = 256


LONGEST_GAP_SECONDS = 3 * 3600


_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


def without_macro(expression: str) -> str:
    """The fields that a macro such as `@daily` stands for; any other expression as it is."""
    return _MACROS.get(expression.strip().lower(), expression)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cron:
    """A validated expression in a known time zone. Created by `parse_cron`."""

    expression: str
    timezone: str
    fields: CronFields

    def next_after(self, instant: datetime) -> datetime | None:
        """The first fire strictly after `instant`, in UTC, or None if there is none before the year 10000.

        Each iteration advances one regime, and a valid expression matches within 400 years, so the loop ends.
        """
        second = to_seconds(instant) + 1
        regime = period_at(self.timezone, second)
        wall = max(second + regime.offset, self._first_wall(regime))
        if second == regime.start and self._fires_for_gap(regime):
            return from_seconds(second)
        while (match := self.fields.next_wall(wall)) is not None:
            if match < regime.wall_end:
                return from_seconds(match - regime.offset)
            regime = period_at(self.timezone, regime.end)
            if self._fires_for_gap(regime):
                return from_seconds(regime.start)
            wall = self._first_wall(regime)
        return None

    def count_between(self, after: datetime, through: datetime) -> int:
        """The number of fires after `after` and at or before `through`, without visiting each."""
        second, end = to_seconds(after) + 1, to_seconds(through) + 1
        count = 0
        while second < end:
            regime = period_at(self.timezone, second)
            begin = max(second + regime.offset, self._first_wall(regime))
            count += self.fields.count_walls(begin, min(end, regime.end) + regime.offset)
            if second == regime.start and self._fires_for_gap(regime):
                count += self.fields.next_wall(regime.wall_start) != regime.wall_start
            second = regime.end
        return count

    def lost_between(self, after: datetime, through: datetime) -> tuple[datetime, int] | None:
        """The fires skipped by gaps that are too long to make up for, after `after` and at or before `through`:
        the first instant after the last such gap, and the number of matching wall times that all of them skipped."""
        if self.fields.is_elapsed:
            return None
        end = to_seconds(through)
        regime = period_at(self.timezone, to_seconds(after))
        count, at = 0, None
        while regime.end <= end:
            regime = period_at(self.timezone, regime.end)
            if regime.wall_start - regime.gap_start > LONGEST_GAP_SECONDS and (
                lost := self.fields.count_walls(regime.gap_start, regime.wall_start)
            ):
                count, at = count + lost, from_seconds(regime.start)
        return None if at is None else (at, count)

    def _first_wall(self, regime: OffsetPeriod) -> int:
        """Where matching starts in a regime: a calendar schedule has already fired for repeated wall times."""
        return regime.wall_start if self.fields.is_elapsed else regime.first_new_wall

    def _fires_for_gap(self, regime: OffsetPeriod) -> bool:
        """Whether the clock change at the start of the regime skipped matches that fire once after it."""
        if self.fields.is_elapsed or not 0 < regime.wall_start - regime.gap_start <= LONGEST_GAP_SECONDS:
            return False
        swallowed = self.fields.next_wall(regime.gap_start)
        return swallowed is not None and swallowed < regime.wall_start


def parse_cron(expression: str, timezone: str = "UTC") -> Cron:
    """Parse and validate an expression of 5 or 6 fields, or a macro such as `@daily`."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise InvalidSchedule(
            f"cron {expression[:40]!r}… has {len(expression)} characters: at most {_LONGEST_EXPRESSION} are allowed"
        )
    find_zone(timezone)
    written = " ".join(expression.split())
    is_macro = written.startswith("@")
    canonical = written.lower() if is_macro else written.upper()
    if is_macro and canonical not in _MACROS:
        raise InvalidSchedule(f"cron {expression!r} is not a known macro: use one of {', '.join(_MACROS)}")
    # An error quotes the expression as it was written.
    fields = parse_fields(_MACROS.get(canonical, written))
    if fields.next_wall(0) is None:
        raise InvalidSchedule(
            f"cron {written!r} never fires: it has no fire in 400 years, because no date matches its day-of-month, month and "
            "day-of-week fields; change one of them"
        )
    return Cron(expression=canonical, timezone=timezone, fields=fields)
