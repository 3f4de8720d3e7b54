"""Which partitions an asset has, or the runs of a schedule are for: one for each hour, day, week or month, or a fixed set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.partitions import (
    FanOut,
    Mapper,
    OneKey,
    Period,
    Rollup,
    SameKey,
    Segments,
    TimeKeys,
    TimeWindow,
    check_key,
    in_zone,
    shifted,
    start_of,
    text_of,
)
from evertick.domain.schedules.time_zones import find_zone

MOST_STATIC = 10_000
_FORMATS = {
    Period.HOUR: "%Y-%m-%dT%H",
    Period.DAY: "%Y-%m-%d",
    Period.WEEK: "%Y-%m-%d",  # of its Monday
    Period.MONTH: "%Y-%m",
    Period.YEAR: "%Y",
}
_ORDER = tuple(Period)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitions:
    """`period`: one for each, in this time zone; a run is for that of its time, `offset` periods later. Without one,
    `format` makes a key of each instant of the schedule, `offset` instants later. `keys`: a fixed set."""

    period: Period | None = None
    timezone: str = "UTC"
    offset: int = 0
    format: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def pattern(self) -> str:
        assert self.format is not None or self.period is not None, "a fixed set has no times"
        return self.format or _FORMATS[self.period or Period.DAY]

    def key_at(self, at: datetime) -> str:
        return text_of(at.astimezone(find_zone(self.timezone)), self.pattern)

    def date_at(self, at: datetime) -> datetime:
        """The start of the partition that a run at this instant is for."""
        assert self.period is not None, "only periods have a start"
        wall = at.astimezone(find_zone(self.timezone)).replace(tzinfo=None)
        return in_zone(shifted(self.period, start_of(self.period, wall), self.offset), self.timezone)

    def date_of(self, key: str) -> datetime | None:
        """What a key stands for; InvalidSchedule, if it is none of these partitions."""
        if self.keys:
            if key not in self.keys:
                raise InvalidSchedule(
                    f"partition {key[:60]!r} does not exist: choose one of {', '.join(self.keys)[:200]}"
                )
            return None
        try:
            wall = datetime.strptime(check_key(key), self.pattern)
        except ValueError:
            example = self.key_at(datetime.fromisoformat("2030-01-07T00:00:00+00:00"))
            raise InvalidSchedule(f"partition {key[:60]!r} is not a key such as {example!r}") from None
        return in_zone(wall, self.timezone) if wall.tzinfo is None else wall

    def to_text(self) -> str:
        given = {"period": self.period, "timezone": self.timezone, "offset": self.offset, "format": self.format}
        made = {name: value for name, value in given.items() if value is not None} if not self.keys else {}
        return json.dumps(made | ({"keys": self.keys} if self.keys else {}), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=4096)
def read_partitions(text: str) -> Partitions:
    """What `to_text` wrote."""
    try:
        raw = json.loads(text)
        if keys := raw.get("keys"):
            return static(keys)
        made = Partitions(
            period=None if raw.get("period") is None else Period(raw["period"]),
            timezone=str(raw["timezone"]),
            offset=int(raw["offset"]),
            format=raw.get("format"),
        )
        if made.period is Period.QUARTER or (made.period is None and not made.format):
            raise ValueError(text)
        find_zone(made.timezone)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidSchedule(f"partitions {text[:60]!r} are not valid: write daily(), or static([...])") from None
    return made


def hourly(*, timezone: str = "UTC", offset: int = 0) -> Partitions:
    """A partition for each hour, such as 2030-01-31T05. `offset=-1`: a run is for the hour before its time."""
    return _periods(Period.HOUR, timezone, offset)


def daily(*, timezone: str = "UTC", offset: int = 0) -> Partitions:
    """A partition for each day, such as 2030-01-31. `offset=-1`: a run is for the day before its time."""
    return _periods(Period.DAY, timezone, offset)


def weekly(*, timezone: str = "UTC", offset: int = 0) -> Partitions:
    """A partition for each week, with the date of its Monday as its key."""
    return _periods(Period.WEEK, timezone, offset)


def monthly(*, timezone: str = "UTC", offset: int = 0) -> Partitions:
    """A partition for each month, such as 2030-01."""
    return _periods(Period.MONTH, timezone, offset)


def static(keys: Iterable[str]) -> Partitions:
    """A fixed set of partitions: `static(["eu", "us"])`."""
    listed = list(keys) if not isinstance(keys, str) else [keys]
    if not 1 <= len(listed) <= MOST_STATIC or any(not isinstance(each, str) for each in listed):
        raise InvalidSchedule(f"static(...) takes a list of 1 to {MOST_STATIC:,} texts")
    return Partitions(keys=tuple(dict.fromkeys(check_key(each) for each in listed)))


def _periods(period: Period, timezone: str, offset: int) -> Partitions:
    find_zone(timezone)
    if isinstance(offset, bool) or not isinstance(offset, int) or abs(offset) > 10_000:
        raise InvalidSchedule(f"offset {offset!r:.40} is not a number of periods")
    return Partitions(period=period, timezone=timezone, offset=offset)


def rollup_to(source: Partitions, to: Partitions | str, at_least: int | None) -> Mapper:
    """From many partitions to one: to the longer period that they are in, or from a fixed set to one key."""
    if at_least is not None and (isinstance(at_least, bool) or not isinstance(at_least, int) or at_least == 0):
        raise InvalidSchedule(
            f"at_least is {at_least!r:.40}: write how many must be there, or -n if n of them may be missing"
        )
    if source.keys:
        key = to if isinstance(to, str) else to.keys[0] if len(to.keys) == 1 else None
        if key is None:
            raise InvalidSchedule("a fixed set of partitions rolls up to one key: write rollup(asset, 'all')")
        return Rollup(mapper=OneKey(key=check_key(key)), window=Segments(keys=source.keys), at_least=at_least)
    long = Partitions() if isinstance(to, str) else to
    window = _window(source, long)
    mapper = TimeKeys(period=window.period, timezone=long.timezone, reads=source.pattern, writes=long.pattern)
    return Rollup(mapper=mapper, window=window, at_least=at_least)


def fan_out_to(source: Partitions, to: Partitions) -> Mapper:
    """From one partition to many: to the shorter periods in it, or to each of a fixed set."""
    if to.keys:
        return FanOut(mapper=SameKey(), window=Segments(keys=to.keys), writes=SameKey(), most=MOST_STATIC)
    window = _window(to, source)
    assert window.step is not None, "periods of periods have a step"
    coarse = TimeKeys(period=window.period, timezone=source.timezone, reads=source.pattern, writes=source.pattern)
    fine = TimeKeys(period=window.step, timezone=to.timezone, reads=to.pattern, writes=to.pattern)
    return FanOut(mapper=coarse, window=window, writes=fine)


def _window(short: Partitions, long: Partitions) -> TimeWindow:
    one, other = short.period, long.period
    if one is None or other is None or _ORDER.index(one) >= _ORDER.index(other) or short.timezone != long.timezone:
        raise InvalidSchedule(
            "a rollup leads from shorter periods to longer ones of the same time zone, and fan_out from longer to shorter:"
            " write rollup(Asset('a', partitions=daily()), monthly())"
        )
    if one is Period.WEEK:
        raise InvalidSchedule("weeks do not fit into months or years: roll up days")
    return TimeWindow(period=other, step=one)


def of_asset(plain: Mapping[str, object] | None) -> Partitions | None:
    """As it is stored with an asset."""
    return None if plain is None else read_partitions(json.dumps(plain, sort_keys=True, separators=(",", ":")))
