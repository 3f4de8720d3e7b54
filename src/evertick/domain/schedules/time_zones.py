"""Time zones as stretches of constant UTC offset, so that calendar rules become integer arithmetic.

Seconds are whole seconds since 1970-01-01T00:00: real ones in UTC, or wall ones as a clock in the zone shows them.
Never reads the current time or the machine's own zone.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from evertick.domain.errors import InvalidSchedule

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_SECONDS = 86_400

# About 388 days: a power of two makes the lookup of a stretch a shift, and probing one stretch costs 0.1 ms.
_STRETCH_BITS = 25
# No zone in tzdata changes its offset twice within 3.9 days (Freetown, 1939), so no change is missed between two probes.
_PROBE_SECONDS = 2 * DAY_SECONDS
# A wall clock may be up to a day ahead of UTC, and `datetime` ends with the year 9999.
_FIRST_PROBE = int((datetime(1, 1, 3, tzinfo=UTC) - EPOCH).total_seconds())
_LAST_PROBE = int((datetime(9999, 12, 29, tzinfo=UTC) - EPOCH).total_seconds())

_FIXED_OFFSET = re.compile(r"([+-])([01]\d|2[0-3]):([0-5]\d)")
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetPeriod:
    """Real time from `start` to `end`, exclusive, all of it at `offset`. The previous offset, `offset_before`, ended at
    `changed_at`: that is `start`, or up to two days earlier when the regime is a later piece of a longer one."""

    start: int
    end: int
    offset: int
    changed_at: int
    offset_before: int

    @property
    def wall_end(self) -> int:
        return self.end + self.offset

    @property
    def gap_start(self) -> int:
        """Wall times from here to `wall_start`, exclusive, never occurred (none, if the clock did not move forward)."""
        return self.start + (self.offset_before if self.changed_at == self.start else self.offset)

    @property
    def wall_start(self) -> int:
        return self.start + self.offset

    @property
    def first_new_wall(self) -> int:
        """The first wall time of this regime that no clock in the zone has shown before."""
        return max(self.start + self.offset, self.changed_at + self.offset_before)


@lru_cache(maxsize=1024)
def find_zone(name: str) -> tzinfo:
    """The zone of that name, or of that fixed offset (`+05:30`); the error for an unknown name suggests a similar one."""
    if fixed := _FIXED_OFFSET.fullmatch(name):
        sign, hours, minutes = fixed.groups()
        distance = timedelta(hours=int(hours), minutes=int(minutes))
        return timezone(distance if sign == "+" else -distance)
    # `right/` counts leap seconds and `localtime` differs from machine to machine.
    if len(name) <= _LONGEST_NAME and not name.startswith(("posix/", "right/")) and name != "localtime":
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            pass
    raise InvalidSchedule(f"unknown time zone {name[:_LONGEST_NAME]!r}: {_advice(name[:_LONGEST_NAME])}")


def _advice(name: str) -> str:
    """Suggests the nearest zone name, by its whole or its last part, ignoring case."""
    names: dict[str, str] = {}
    for known in sorted(available_timezones()):
        names.setdefault(known.rpartition("/")[2].casefold(), known)
    names.update((known.casefold(), known) for known in available_timezones())
    wanted = name.strip().replace(" ", "_").casefold()
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)
    suggestion = f"did you mean {names[near[0]]!r}? " if near else ""
    return f"{suggestion}Use an IANA name such as 'Europe/Berlin', 'UTC', or an offset such as '+05:30'"


def to_seconds(instant: datetime) -> int:
    """Whole real seconds, rounded down."""
    if instant.tzinfo is None:
        raise ValueError(f"{instant!r} has no time zone: an instant must carry one")
    since = instant - EPOCH
    return since.days * DAY_SECONDS + since.seconds


def from_seconds(seconds: int) -> datetime | None:
    """The instant, or None if it is outside the years 1 to 9999."""
    try:
        return EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return None


def period_at(zone_name: str, seconds: int) -> OffsetPeriod:
    """The regime that contains a real second. Long regimes come in several pieces."""
    regimes = _periods(zone_name, seconds >> _STRETCH_BITS)
    for regime in regimes:
        if seconds < regime.end:
            return regime
    raise AssertionError("the last regime of a stretch reaches to its end")


def first_instant(zone_name: str, wall: datetime) -> datetime | None:
    """When a clock in the zone first shows `wall`, or the first instant after the gap that skips it."""
    wall_seconds = to_seconds(wall.replace(tzinfo=UTC))
    regime = period_at(zone_name, wall_seconds - _PROBE_SECONDS)
    while wall_seconds >= regime.wall_end:
        regime = period_at(zone_name, regime.end)
    if wall_seconds < regime.wall_start:
        return from_seconds(regime.start)
    shown = from_seconds(wall_seconds - regime.offset)
    return None if shown is None else shown.replace(microsecond=wall.microsecond)


@lru_cache(maxsize=4096)
def _periods(zone_name: str, stretch: int) -> tuple[OffsetPeriod, ...]:
    """Every regime of one stretch of time, found by probing the zone often enough."""
    zone = find_zone(zone_name)
    begin, finish = stretch << _STRETCH_BITS, (stretch + 1) << _STRETCH_BITS
    regimes: list[OffsetPeriod] = []
    # A clock that moved back shortly before this stretch may still be repeating wall times.
    before, offset = _offset(zone, begin - _PROBE_SECONDS), _offset(zone, begin)
    changed = begin if before == offset else _change_between(zone, begin - _PROBE_SECONDS, begin)
    start = low = begin
    while low < finish - 1:
        high = min(low + _PROBE_SECONDS, finish - 1)
        if _offset(zone, high) != offset:
            high = _change_between(zone, low, high)
            regimes.append(OffsetPeriod(start=start, end=high, offset=offset, changed_at=changed, offset_before=before))
            start, changed, before, offset = high, high, offset, _offset(zone, high)
        low = high
    regimes.append(OffsetPeriod(start=start, end=finish, offset=offset, changed_at=changed, offset_before=before))
    return tuple(regimes)


def _change_between(zone: tzinfo, low: int, high: int) -> int:
    """The first second at an offset other than `low`'s, given that `high` has a different one."""
    offset, between = _offset(zone, low), range(low + 1, high)
    return low + 1 + bisect_left(between, True, key=lambda second: _offset(zone, second) != offset)


def _offset(zone: tzinfo, seconds: int) -> int:
    asked = EPOCH + timedelta(seconds=min(max(seconds, _FIRST_PROBE), _LAST_PROBE))
    distance = asked.astimezone(zone).utcoffset()
    assert distance is not None, "every zone of find_zone has an offset"
    return distance.days * DAY_SECONDS + distance.seconds


def with_zone(instant: datetime) -> datetime:
    """An instant without a time zone counts as UTC, as in Airflow."""
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
