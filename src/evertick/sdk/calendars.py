"""Calendars of business days: by country or exchange, from an iCalendar file, or of your own days.

Reads libraries and files while a DAG file is loaded, and never later: the instants of its schedules are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.calendars import WEEKEND, Calendar
from evertick.domain.schedules.time_zones import find_zone

# The years for which closed days are computed: a schedule of a later time is loaded again long before.
FIRST_YEAR, LAST_YEAR = 2000, 2050
_MOST_DAYS = 10_000


def calendar(name: str, closed: Iterable[date | str] = (), *, weekend: Iterable[int] = WEEKEND) -> Calendar:
    """A calendar of your own: closed days as dates or texts such as "2030-12-24", and the days of its weekend, Monday is 0."""
    try:
        days = frozenset(date.fromisoformat(each) if isinstance(each, str) else _day(each, None) for each in closed)
    except (TypeError, ValueError) as error:
        raise InvalidSchedule(f"calendar {name!r}: a closed day is not a date: {error}") from None
    return Calendar(name=name, closed=days, weekend=frozenset(weekend))


def country(code: str, subdivision: str | None = None) -> Calendar:
    """The public holidays of a country, or of a part of it: `country("DE", "BY")`. Needs the extra `calendars`."""
    module = _library("holidays")
    return _of_holidays(
        f"{code}-{subdivision}" if subdivision else code,
        lambda years: module.country_holidays(code, subdiv=subdivision, years=years),
    )


def exchange(code: str) -> Calendar:
    """The holidays of an exchange: `exchange("XNYS")`. Needs the extra `calendars`."""
    module = _library("holidays")
    return _of_holidays(code, lambda years: module.financial_holidays(code, years=years))


def calendar_from_ics(path: str | Path, *, timezone: str = "UTC") -> Calendar:
    """The closed days of an iCalendar file, relative to the DAG file's folder: the days of its events, also of those that repeat.
    Times count in `timezone`. Needs the extra `calendars`."""
    parse = _library("icalendar").Calendar.from_ical
    try:
        found = parse(Path(path).read_bytes())
        days = frozenset(day for event in found.walk("VEVENT") for day in _days_of(event, timezone))
    except (OSError, ValueError, KeyError) as error:
        raise InvalidSchedule(f"{path} is not a readable iCalendar file: {error}") from None
    if len(days) > _MOST_DAYS:
        raise InvalidSchedule(f"{path} has {len(days):,} days; at most {_MOST_DAYS:,} are allowed")
    return Calendar(name=Path(path).stem, closed=days)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise InvalidSchedule(
            f"{name} is not installed where this file is loaded: install `evertick[calendars]`, or declare {name} in the file"
        ) from None


def _of_holidays(name: str, make: Any) -> Calendar:
    try:
        found = make(range(FIRST_YEAR, LAST_YEAR + 1))
    except (NotImplementedError, KeyError, AttributeError) as error:
        raise InvalidSchedule(f"holidays has no calendar {name!r}: {error}") from None
    return Calendar(name=name, closed=frozenset(found.keys()), weekend=frozenset(found.weekend))


def _days_of(event: Any, timezone: str) -> Iterator[date]:
    start = event.decoded("DTSTART")
    first = _day(start, timezone)
    length = _length(event, start, timezone)
    for day in _starts(event, start, first):
        for number in range(length):
            yield day + timedelta(days=number)


def _length(event: Any, start: date, timezone: str) -> int:
    """How many days it covers. The end of an event of whole days is the day after it."""
    if "DURATION" in event:
        end = start + event.decoded("DURATION")
    elif "DTEND" in event:
        end = event.decoded("DTEND")
    else:
        return 1
    last = _day(end - timedelta(microseconds=1) if isinstance(end, datetime) else end - timedelta(days=1), timezone)
    return max(1, min((last - _day(start, timezone)).days + 1, 366))


def _starts(event: Any, start: date, first: date) -> Iterator[date]:
    if "RRULE" not in event:
        yield first
        return
    rule = event["RRULE"].to_ical().decode()
    # Of the library that icalendar itself uses.
    plain = datetime(first.year, first.month, first.day)
    rule = ";".join(part for part in rule.split(";") if not part.startswith("UNTIL=")) + _until(rule)
    for at in import_module("dateutil.rrule").rrulestr(rule, dtstart=plain):
        if at.year > LAST_YEAR:
            break
        yield at.date()


def _until(rule: str) -> str:
    found = [part[len("UNTIL=") :][:8] for part in rule.split(";") if part.startswith("UNTIL=")]
    return f";UNTIL={found[0]}" if found else ""


def _day(value: date, timezone: str | None) -> date:
    if not isinstance(value, datetime):
        return value
    return (value.astimezone(find_zone(timezone)) if timezone and value.tzinfo else value).date()
