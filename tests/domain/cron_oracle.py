"""A second, slow cron that looks at every tick of the clock: what `evertick.domain.schedules.cron` must agree with.

It shares no code with it: its own reading of expressions, the zone asked at each tick, and the daylight-saving rule
told by what the wall clock does from one tick to the next. `make sweep` (`tests/domain/cron_sweep.py`) compares the two
around every change of every zone.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

from evertick.domain.schedules.cron import parse_cron

EXPRESSIONS = (
    "30 2 * * *",
    "30 1 * * *",
    "0 0 * * *",
    "0 12 * * *",
    "15,45 1-3 * * *",
    "*/30 2 * * *",
    "0 0-23 * * *",
    "5 0,23 * * SUN,MON",
    "0 * * * *",
    "0 */2 * * *",
    "*/15 * * * *",
    "10 */23 * * *",
)

_AROUND = timedelta(hours=36)
_LONGEST_GAP = timedelta(hours=3)
_NAMES = {
    name.upper(): str(number) for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))
} | {
    name.upper(): str(number)
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), start=1
    )
}
_RANGES = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


@dataclass(frozen=True)
class Tick:
    """One real instant and what the clock on the wall shows then."""

    instant: datetime
    wall: datetime


@dataclass
class Sweep:
    changes: int = 0
    cases: int = 0
    mismatches: list[str] = field(default_factory=list)


def matches(expression: str, wall: datetime) -> bool:
    """Whether the wall time fits the expression, told field by field."""
    second, minute, hour, day, month, weekday = _fields(expression)
    if wall.second not in second or wall.minute not in minute or wall.hour not in hour or wall.month not in month:
        return False
    length = calendar.monthrange(wall.year, wall.month)[1]
    day_fits = any(_day_fits(item, wall, length) for item in day)
    weekday_fits = any(_weekday_fits(item, wall, length) for item in weekday)
    texts = expression.split()
    if texts[-1].startswith(("+", "*")) or texts[-3].startswith("*"):
        return day_fits and weekday_fits
    return day_fits or weekday_fits


def fires(expression: str, ticks: list[Tick]) -> list[datetime]:
    """Every fire among the ticks after the first one, by the written daylight-saving rule."""
    if expression.split()[-4].startswith("*"):
        return [tick.instant for tick in ticks[1:] if matches(expression, tick.wall)]
    step = ticks[1].instant - ticks[0].instant
    shown = {ticks[0].wall}
    found = []
    for before, tick in pairwise(ticks):
        missing = list(_walls(before.wall + step, tick.wall, step))
        swallowed = len(missing) * step <= _LONGEST_GAP and any(matches(expression, wall) for wall in missing)
        if swallowed or (tick.wall not in shown and matches(expression, tick.wall)):
            found.append(tick.instant)
        shown.add(tick.wall)
    return found


def ticks_between(zone: str, begin: datetime, end: datetime, step: timedelta) -> list[Tick]:
    info = ZoneInfo(zone)
    return [Tick(at, at.astimezone(info).replace(tzinfo=None)) for at in _walls(begin, end + step, step)]


def transitions(zone: str, years: Iterable[int]) -> Iterator[datetime]:
    """Every change of offset in those years: the first second at the new one. Asks four times a day."""
    info, stride = ZoneInfo(zone), timedelta(hours=6)
    for year in years:
        for low in _walls(datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC), stride):
            if low.astimezone(info).utcoffset() != (low + stride).astimezone(info).utcoffset():
                yield _first_change(info, low, low + stride)


def _first_change(info: ZoneInfo, low: datetime, high: datetime) -> datetime:
    offset = low.astimezone(info).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + timedelta(seconds=(high - low) // timedelta(seconds=2))
        low, high = (middle, high) if middle.astimezone(info).utcoffset() == offset else (low, middle)
    return high


def sweep(zones: Iterable[str], years: Iterable[int], expressions: Iterable[str] = EXPRESSIONS) -> Sweep:
    """Compare every expression with `parse_cron` around every change of offset."""
    result, years, expressions = Sweep(), list(years), list(expressions)
    for zone in zones:
        for change in transitions(zone, years):
            clock = _clock_around(zone, change)
            begin, end = clock.begin, clock.end
            result.changes += 1
            for expression in expressions:
                expected = _expected(expression, clock)
                actual = list(_walk(expression, zone, begin, end))
                result.cases += 1
                if actual != expected:
                    odd = sorted(set(actual) ^ set(expected))
                    result.mismatches.append(f"{expression} {zone} {change:%Y-%m-%dT%H:%M:%SZ}: {odd[:3]}")
    return result


@dataclass(frozen=True)
class Clock:
    """What the clock of some zone does in a stretch of time: from which tick on it is how far from UTC."""

    begin: datetime
    end: datetime
    step: timedelta
    offsets: tuple[tuple[datetime, timedelta], ...]

    def ticks(self) -> list[Tick]:
        found, ends = [], [since for since, _ in self.offsets[1:]] + [self.end + self.step]
        for (since, offset), until in zip(self.offsets, ends, strict=True):
            found += [Tick(at, (at + offset).replace(tzinfo=None)) for at in _walls(since, until, self.step)]
        return found


def _clock_around(zone: str, change: datetime) -> Clock:
    """By the minute; by the second, and closer, where a clock was not a whole number of minutes away from UTC."""
    info = ZoneInfo(zone)
    offsets = [_offset(info, at) for at in (change - timedelta(seconds=1), change)]
    is_whole = change.second == 0 and all(not offset % timedelta(minutes=1) for offset in offsets)
    around, step = (_AROUND, timedelta(minutes=1)) if is_whole else (timedelta(hours=3), timedelta(seconds=1))
    begin, end = change - around, change + around
    seen: list[tuple[datetime, timedelta]] = []
    for at in _walls(begin, end + step, step):
        offset = _offset(info, at)
        if not seen or seen[-1][1] != offset:
            seen.append((at, offset))
    return Clock(begin, end, step, tuple(seen))


@lru_cache(maxsize=200_000)
def _expected(expression: str, clock: Clock) -> list[datetime]:
    """Many zones change their clocks together: what it comes to is found out once."""
    return fires(expression, _ticks_of(clock))


@lru_cache(maxsize=2)
def _ticks_of(clock: Clock) -> list[Tick]:
    return clock.ticks()


def _offset(info: ZoneInfo, at: datetime) -> timedelta:
    offset = at.astimezone(info).utcoffset()
    assert offset is not None
    return offset


def _walk(expression: str, zone: str, after: datetime, through: datetime) -> Iterator[datetime]:
    cron = parse_cron(expression, zone)
    fire = cron.next_after(after)
    while fire is not None and fire <= through:
        yield fire
        fire = cron.next_after(fire)


def _walls(begin: datetime, end: datetime, step: timedelta) -> Iterator[datetime]:
    while begin < end:
        yield begin
        begin += step


@lru_cache
def _fields(expression: str) -> list[set[int | str]]:
    texts = expression.upper().split()
    texts = texts if len(texts) == 6 else ["0", *texts]
    return [_expand(text.lstrip("+"), *bounds) for text, bounds in zip(texts, _RANGES, strict=True)]


def _expand(text: str, low: int, high: int) -> set[int | str]:
    for name, number in _NAMES.items():
        text = text.replace(name, number)
    found: set[int | str] = set()
    for item in text.split(","):
        if "L" in item or "#" in item:
            found.add(item)
            continue
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        begin = low if span == "*" else int(first)
        end = high if span == "*" or (step and not last) else int(last or first)
        found.update(range(begin, end + 1, int(step or 1)))
    return found


def _day_fits(item: int | str, wall: datetime, length: int) -> bool:
    if item == "L":
        return wall.day == length
    if item == "LW":
        workdays = [day for day in range(1, length + 1) if wall.replace(day=day).weekday() < 5]
        return wall.day == workdays[-1]
    return wall.day == item


def _weekday_fits(item: int | str, wall: datetime, length: int) -> bool:
    weekday = wall.isoweekday() % 7
    if isinstance(item, int):
        return weekday == item % 7
    if item.endswith("L"):
        return weekday == int(item[:-1]) % 7 and wall.day > length - 7
    wanted, _, nth = item.partition("#")
    return weekday == int(wanted) % 7 and (wall.day + 6) // 7 == int(nth)
