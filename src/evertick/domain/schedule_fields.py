"""The fields of a schedule, each parsed and validated by itself; domain/schedule.py validates them together."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from evertick.domain import after
from evertick.domain.errors import InvalidSchedule
from evertick.domain.zones import first_instant

_SHORTEST_INTERVAL = timedelta(milliseconds=50)
_LONGEST_INTERVAL = timedelta(days=36_525)
EARLIEST = datetime(1900, 1, 1, tzinfo=UTC)
_LONGEST_JITTER = timedelta(days=1)
_MOST_TIMES = 1000


def read_interval(raw: object) -> float:
    """The interval in seconds, exact to the microsecond."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise InvalidSchedule(f"every_seconds {raw!r:.40} is not a number: write seconds, such as 0.25 or 30")
    shortest, longest = _SHORTEST_INTERVAL.total_seconds(), _LONGEST_INTERVAL.total_seconds()
    if not shortest <= raw <= longest:
        raise InvalidSchedule(f"an interval of {raw} s is not allowed: it must be between {shortest} s and 100 years")
    return timedelta(seconds=raw).total_seconds()


def read_times(raw: object, zone: str) -> tuple[datetime, ...]:
    """The instants in order, without duplicates."""
    if isinstance(raw, str) or not isinstance(raw, Iterable):
        raise InvalidSchedule(f"times {raw!r:.40} is not a list: write [2030-01-01T00:00:00Z, ...]")
    listed = list(raw)
    if not 1 <= len(listed) <= _MOST_TIMES:
        raise InvalidSchedule(f"a list of {len(listed)} times is not allowed: it must have 1 to {_MOST_TIMES:,}")
    found = {
        read_instant(f"times[{place}]", each if each is not None else "", zone) for place, each in enumerate(listed)
    }
    return tuple(sorted(each for each in found if each is not None))


def read_condition(raw: object) -> str:
    return after.to_text(after.read_text(str(raw)))


def read_jitter(raw: object) -> float | None:
    """The jitter in seconds, exact to the millisecond; zero is the same as omitted."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise InvalidSchedule(f"jitter {raw!r:.40} is not a number of seconds: write one such as 30")
    if not 0 <= raw <= _LONGEST_JITTER.total_seconds():
        raise InvalidSchedule(f"a jitter of {raw} s is not allowed: it must be between 0 s and one day")
    return round(float(raw), 3) or None


def read_instant(name: str, raw: object, zone: str) -> datetime | None:
    if raw is None:
        return None
    try:
        moment = datetime.fromisoformat(raw) if isinstance(raw, str) else raw
        if not isinstance(moment, datetime):
            raise ValueError
        instant = first_instant(zone, moment) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        instant = None
    if instant is None or instant < EARLIEST:
        raise InvalidSchedule(
            f"{name} {str(raw)[:40]!r} is not a date and time from 1900 to 9999: write it as 2030-01-01T00:00:00Z"
        )
    return instant
