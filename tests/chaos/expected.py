"""When schedules must fire and how long retries must wait, worked out a second time.

Shares no code with `evertick.domain`: a schedule is its published JSON, a cron expression is matched against every minute
of the wall clock, and the daylight-saving rule is told by what that clock does from one minute to the next.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

_MINUTE = timedelta(minutes=1)
_LONGEST_GAP = timedelta(hours=3)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_FIRES = 2_000_000
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = {name.upper(): number for number, name in enumerate(calendar.month_abbr) if name}
_DAYS = {name: number for number, name in enumerate(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"))}


class Expression(NamedTuple):
    """What a cron expression allows, field by field."""

    seconds: tuple[int, ...]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    needs_both_days: bool
    is_elapsed: bool


def fires(spec: Mapping[str, Any], after: datetime, through: datetime) -> Iterator[datetime]:
    """Every instant after `after` and at or before `through` at which the schedule must fire, in order."""
    start, end = _instant(spec.get("start_at")), _instant(spec.get("end_at"))
    if start is not None:
        after = max(after, start - timedelta(microseconds=1))
    if end is not None:
        through = min(through, end)
    match spec["kind"]:
        case "once":
            at = _instant(spec["at"])
            assert at is not None
            found: Iterator[datetime] = iter([at] if after < at <= through else [])
        case "interval":
            found = _interval(spec, after, through)
        case "cron":
            found = _cron(spec["expression"], spec.get("timezone", "UTC"), after, through)
        case kind:
            raise ValueError(f"a schedule of kind {kind!r} is unknown here: teach expected.py about it")
    for number, instant in enumerate(found):
        assert number < _MOST_FIRES, f"more than {_MOST_FIRES} fires between {after} and {through}: {spec}"
        yield instant


def shortest_delay(retry: Mapping[str, Any], failures: int) -> float:
    """The seconds that must lie between the `failures`-th failure and the next attempt, with the largest jitter."""
    delay = float(retry.get("delay_seconds", 30.0))
    cap = retry.get("max_delay_seconds", 3600.0)
    match retry.get("backoff", "fixed"):
        case "linear":
            delay *= failures
        case "exponential":
            delay *= 2.0 ** min(failures - 1, 60)
        case "fixed":
            cap = None
        case backoff:
            raise ValueError(f"a back-off of kind {backoff!r} is unknown here: teach expected.py about it")
    if cap is not None:
        delay = min(delay, float(cap))
    return float(delay * (1.0 - float(retry.get("jitter", 0.0))))


def _interval(spec: Mapping[str, Any], after: datetime, through: datetime) -> Iterator[datetime]:
    anchor = _instant(spec.get("anchor_at")) or _EPOCH
    every = timedelta(microseconds=round(float(spec["every_seconds"]) * 1_000_000))
    if every <= timedelta():
        raise ValueError(f"an interval of {every} never ends")
    at = anchor + ((after - anchor) // every + 1) * every
    while at <= through:
        yield at
        at += every


def _cron(text: str, zone: str, after: datetime, through: datetime) -> Iterator[datetime]:
    expression, info = _parsed(text), ZoneInfo(zone)
    minute = after.astimezone(UTC).replace(second=0, microsecond=0)
    was = _wall(minute - _MINUTE, info)
    while minute <= through:
        wall = _wall(minute, info)
        for instant in _fires_in(expression, minute, wall, was, info):
            if after < instant <= through:
                yield instant
        minute, was = minute + _MINUTE, wall


def _fires_in(
    expression: Expression, minute: datetime, wall: datetime, was: datetime, info: ZoneInfo
) -> Iterator[datetime]:
    """The fires of one real minute, given what the wall clock showed in it and in the one before."""
    if expression.is_elapsed:
        is_swallowed, is_first_copy = False, True
    else:
        is_swallowed = timedelta() < wall - was - _MINUTE <= _LONGEST_GAP and _any_in_gap(expression, was, wall)
        is_first_copy = wall.replace(tzinfo=info, fold=0).astimezone(UTC) >= minute
    offsets = set(expression.seconds) if is_first_copy and _allows(expression, wall) else set()
    if is_swallowed:
        # All that the clock passed over is one fire, at the first instant after the gap.
        offsets.add(0)
    yield from (minute + timedelta(seconds=second) for second in sorted(offsets))


def _any_in_gap(expression: Expression, was: datetime, wall: datetime) -> bool:
    missing = was + _MINUTE
    while missing < wall:
        if _allows(expression, missing):
            return True
        missing += _MINUTE
    return False


def _allows(expression: Expression, wall: datetime) -> bool:
    if (
        wall.minute not in expression.minutes
        or wall.hour not in expression.hours
        or wall.month not in expression.months
    ):
        return False
    by_day, by_weekday = wall.day in expression.days, wall.isoweekday() % 7 in expression.weekdays
    return (by_day and by_weekday) if expression.needs_both_days else (by_day or by_weekday)


def _wall(instant: datetime, info: ZoneInfo) -> datetime:
    return instant.astimezone(info).replace(tzinfo=None, fold=0)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Expression:
    fields = _NICKNAMES.get(text.lower(), text).upper().split()
    fields = fields if len(fields) == 6 else ["0", *fields]
    second, minute, hour, day, month, weekday = fields
    if any(mark in day + weekday for mark in "LW#?"):
        raise ValueError(f"{text!r} has days by their place in the month: teach expected.py about them")
    return Expression(
        seconds=tuple(sorted(_expand(second, 0, 59))),
        minutes=_expand(minute, 0, 59),
        hours=_expand(hour, 0, 23),
        days=_expand(day, 1, 31),
        months=_expand(month, 1, 12, _MONTHS),
        weekdays=frozenset(number % 7 for number in _expand(weekday.lstrip("+"), 0, 7, _DAYS)),
        needs_both_days=day.startswith("*") or weekday.startswith(("*", "+")),
        is_elapsed=hour.startswith("*"),
    )


def _expand(text: str, low: int, high: int, names: Mapping[str, int] | None = None) -> frozenset[int]:
    def number(word: str) -> int:
        return names[word] if names and word in names else int(word)

    found: set[int] = set()
    for item in text.split(","):
        span, _, step = item.partition("/")
        first, _, last = span.partition("-")
        begin = low if span == "*" else number(first)
        end = high if span == "*" or (step and not last) else number(last or first)
        found.update(range(begin, end + 1, int(step or 1)))
    return frozenset(found)


def _instant(raw: object) -> datetime | None:
    if raw is None:
        return None
    return raw if isinstance(raw, datetime) else datetime.fromisoformat(str(raw))
