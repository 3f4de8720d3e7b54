"""Keys of partitions: how an update of one partition of an asset leads to the partitions that a DAG runs for.

A mapper is data: it is stored as JSON in the condition of a schedule, and evaluated by the scheduler. The rules and formats are
those of Airflow's built-in mappers, which `tests/airflow/test_partition_mappers.py` compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from typing import Protocol, TypeAlias, assert_never

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.time_zones import find_zone

LONGEST_KEY = 250
MOST_KEYS = 1000  # how many partitions one update may start, unless its mapper says otherwise
MOST_SEGMENTS = 100_000
_DEEPEST = 10
_QUARTER, _WORD = "[1-4]", r"\w+"
_PARTS = re.compile(r"%([YmdHMSVUW])|\{(\w+)\}|(.)", re.DOTALL)
_DIRECTIVES = {"Y": r"\d{4}", **dict.fromkeys("mdHMSVUW", r"\d{2}")}


class Period(StrEnum):
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    QUARTER = "quarter"
    YEAR = "year"


FORMATS = {
    Period.HOUR: "%Y-%m-%dT%H",
    Period.DAY: "%Y-%m-%d",
    Period.WEEK: "%Y-%m-%d (W%V)",
    Period.MONTH: "%Y-%m",
    Period.QUARTER: "%Y-Q{quarter}",
    Period.YEAR: "%Y",
}
_STEPS = {Period.QUARTER: Period.MONTH, Period.YEAR: Period.MONTH, Period.DAY: Period.HOUR}


def check_key(key: str) -> str:
    if not key.strip() or len(key) > LONGEST_KEY or not key.isprintable():
        raise InvalidSchedule(
            f"{key[:40]!r} cannot be the key of a partition: write 1 to {LONGEST_KEY} printable characters"
        )
    return key


def in_zone(wall: datetime, zone: str) -> datetime:
    """A wall time there. One that a clock shows twice is the second; one that it skips is an hour later, as with Airflow."""
    found = wall.replace(tzinfo=find_zone(zone), fold=1)
    early, late = found.replace(fold=0).utcoffset(), found.utcoffset()
    assert early is not None and late is not None, "every zone has an offset"
    return found + (late - early) if late > early else found


def start_of(period: Period, at: datetime) -> datetime:
    midnight = partial(at.replace, hour=0, minute=0, second=0, microsecond=0)
    match period:
        case Period.HOUR:
            return at.replace(minute=0, second=0, microsecond=0)
        case Period.DAY:
            return midnight()
        case Period.WEEK:
            return (at - timedelta(days=at.weekday())).replace(hour=0, minute=0, second=0, microsecond=0)
        case Period.MONTH:
            return midnight(day=1)
        case Period.QUARTER:
            return midnight(month=(at.month - 1) // 3 * 3 + 1, day=1)
        case Period.YEAR:
            return midnight(month=1, day=1)
        case _:
            assert_never(period)


def shifted(period: Period, start: datetime, count: int) -> datetime:
    """The start of another period; `start` is that of one."""
    months = {Period.MONTH: 1, Period.QUARTER: 3, Period.YEAR: 12}.get(period)
    if months is not None:
        if start.day != 1:
            raise ValueError(f"{start.isoformat()} is not the start of a {period}")
        total = start.month - 1 + months * count
        return start.replace(year=start.year + total // 12, month=total % 12 + 1)
    length = {Period.HOUR: timedelta(hours=1), Period.DAY: timedelta(days=1), Period.WEEK: timedelta(days=7)}[period]
    return start + count * length


def text_of(at: datetime, pattern: str) -> str:
    text = at.strftime(pattern)
    return text.format(quarter=(at.month - 1) // 3 + 1) if "{quarter}" in pattern else text


Decoded: TypeAlias = str | datetime


class Mapper(Protocol):
    """`downstream`: the partitions that an update of one counts for, or ValueError. `decode` and `encode`: between a key after
    the mapping and one before it. `date_of`: the instant that a key after the mapping stands for."""

    def downstream(self, key: str) -> list[str]: ...
    def decode(self, key: str) -> Decoded: ...
    def encode(self, decoded: Decoded) -> str: ...
    def date_of(self, key: str) -> datetime | None: ...
    def plain(self) -> dict[str, object]: ...


class _Plain:
    """What most mappers have in common: keys that are texts without a meaning."""

    def decode(self, key: str) -> Decoded:
        return key

    def encode(self, decoded: Decoded) -> str:
        return str(decoded)

    def date_of(self, key: str) -> datetime | None:
        return None


@dataclass(frozen=True, kw_only=True)
class SameKey(_Plain):
    def downstream(self, key: str) -> list[str]:
        return [key]

    def plain(self) -> dict[str, object]:
        return {"map": "same"}


@dataclass(frozen=True, kw_only=True)
class OnlyKeys(_Plain):
    """The same key, if it is one of these."""

    keys: tuple[str, ...]

    def downstream(self, key: str) -> list[str]:
        if key not in self.keys:
            raise ValueError(f"key {key!r} is none of {', '.join(self.keys)[:200]}")
        return [key]

    def plain(self) -> dict[str, object]:
        return {"map": "only", "keys": list(self.keys)}


@dataclass(frozen=True, kw_only=True)
class OneKey(_Plain):
    """Every key leads to this one."""

    key: str

    def downstream(self, key: str) -> list[str]:
        return [self.key]

    def plain(self) -> dict[str, object]:
        return {"map": "one", "key": self.key}


@dataclass(frozen=True, kw_only=True)
class TimeKeys:
    """The period that a time belongs to. Both keys are texts of times."""

    period: Period
    timezone: str = "UTC"
    reads: str = "%Y-%m-%dT%H:%M:%S"
    writes: str

    def downstream(self, key: str) -> list[str]:
        at = datetime.strptime(key, self.reads)
        aware = in_zone(at, self.timezone) if at.tzinfo is None else at.astimezone(find_zone(self.timezone))
        return [self.format(start_of(self.period, aware))]

    def format(self, at: datetime) -> str:
        return text_of(at, self.writes)

    def decode(self, key: str) -> datetime:
        if self.period not in (Period.WEEK, Period.QUARTER):
            return datetime.strptime(key, self.writes)
        found = self._pattern.search(key)
        parts = {} if found is None else found.groupdict()
        if self.period is Period.QUARTER and parts.keys() >= {"Y", "quarter"}:
            return datetime(int(parts["Y"]), int(parts["quarter"]) * 3 - 2, 1)
        if self.period is Period.WEEK and parts.keys() >= {"Y", "m", "d"}:
            return datetime(int(parts["Y"]), int(parts["m"]), int(parts["d"]))
        raise ValueError(f"{key!r} is not a {self.period} as {self.writes!r}")

    def encode(self, decoded: Decoded) -> str:
        assert isinstance(decoded, datetime), "a window of times has times"
        zone = find_zone(self.timezone)
        wall = decoded if decoded.tzinfo is None else decoded.astimezone(zone).replace(tzinfo=None)
        return in_zone(wall, self.timezone).strftime(self.reads)

    def date_of(self, key: str) -> datetime | None:
        at = start_of(self.period, self.decode(key))
        return in_zone(at, self.timezone) if at.tzinfo is None else at

    def plain(self) -> dict[str, object]:
        return {
            "map": "time",
            "period": self.period.value,
            "timezone": self.timezone,
            "reads": self.reads,
            "writes": self.writes,
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Reads what `writes` has written, also what strptime does not read, such as the number of a week."""

        def part(found: re.Match[str]) -> str:
            directive, name, other = found.groups()
            if directive:
                return f"(?P<{directive}>{_DIRECTIVES[directive]})"
            return re.escape(other) if other else f"(?P<{name}>{_QUARTER if name == 'quarter' else _WORD})"

        return re.compile(f"^{_PARTS.sub(part, self.writes)}$")


@dataclass(frozen=True, kw_only=True)
class Chain(_Plain):
    """One mapper after the other."""

    parts: tuple[Mapper, ...]
    most: int = MOST_KEYS

    def downstream(self, key: str) -> list[str]:
        keys = [key]
        for part in self.parts:
            keys = [made for each in keys for made in part.downstream(each)]
        return keys

    def date_of(self, key: str) -> datetime | None:
        return self.parts[-1].date_of(key)

    def plain(self) -> dict[str, object]:
        return {"map": "chain", "parts": [each.plain() for each in self.parts], "most": self.most}


@dataclass(frozen=True, kw_only=True)
class Product(_Plain):
    """Keys of several parts, each with a mapper of its own."""

    parts: tuple[Mapper, ...]
    delimiter: str = "|"

    def downstream(self, key: str) -> list[str]:
        segments = key.split(self.delimiter)
        if len(segments) != len(self.parts):
            raise ValueError(f"key {key!r} has {len(segments)} parts, and {len(self.parts)} are expected")
        made = [part.downstream(segment) for part, segment in zip(self.parts, segments, strict=True)]
        if any(len(each) != 1 for each in made):
            raise ValueError("a part of a key must lead to one key")
        return [self.delimiter.join(each[0] for each in made)]

    def date_of(self, key: str) -> datetime | None:
        segments = key.split(self.delimiter)
        if len(segments) != len(self.parts):
            return None
        dates = [part.date_of(segment) for part, segment in zip(self.parts, segments, strict=True)]
        known = [each for each in dates if each is not None]
        return known[0] if len(known) == 1 else None

    def plain(self) -> dict[str, object]:
        return {"map": "product", "delimiter": self.delimiter, "parts": [each.plain() for each in self.parts]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeWindow:
    """The shorter periods of a period. `is_trailing`: as many, up to and including its start."""

    period: Period
    step: Period | None = None  # None: a minute
    is_trailing: bool = False

    def members(self, start: Decoded) -> list[Decoded]:
        assert isinstance(start, datetime), "a window of times has times"
        if self.is_trailing:
            before = shifted(self.period, start, -1)
            return [self._next(each) for each in self._from(before, start)]
        return [*self._from(start, shifted(self.period, start, 1))]

    def _from(self, start: datetime, end: datetime) -> Iterator[datetime]:
        at = start
        while at < end:
            yield at
            at = self._next(at)

    def _next(self, at: datetime) -> datetime:
        return at + timedelta(minutes=1) if self.step is None else shifted(self.step, at, 1)

    def plain(self) -> dict[str, object]:
        step = None if self.step is None else self.step.value
        return {"period": self.period.value, "step": step, "is_trailing": self.is_trailing}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """A fixed set of keys."""

    keys: tuple[str, ...]

    def members(self, start: Decoded) -> list[Decoded]:
        return list(self.keys)

    def plain(self) -> dict[str, object]:
        return {"keys": list(self.keys)}


Window: TypeAlias = TimeWindow | Segments


def window_of(period: Period, *, is_trailing: bool = False) -> TimeWindow:
    """With the usual steps: the minutes of an hour, the hours of a day, the days of a week or a month, the months of a year."""
    step = None if period is Period.HOUR else _STEPS.get(period, Period.DAY)
    return TimeWindow(period=period, step=step, is_trailing=is_trailing)


@dataclass(frozen=True, kw_only=True)
class Rollup:
    """Many partitions lead to one, which waits for all of them, or for `at_least` as many; negative: so many may be missing."""

    mapper: Mapper
    window: Window
    at_least: int | None = None

    def downstream(self, key: str) -> list[str]:
        return self.mapper.downstream(key)

    def decode(self, key: str) -> Decoded:
        return key

    def encode(self, decoded: Decoded) -> str:
        return str(decoded)

    def date_of(self, key: str) -> datetime | None:
        return self.mapper.date_of(key)

    def expected(self, key: str) -> frozenset[str]:
        return frozenset(map(self.mapper.encode, self.window.members(self.mapper.decode(key))))

    def is_met(self, key: str, received: Collection[str]) -> bool:
        expected = self.expected(key)
        found = len(expected & set(received))
        if self.at_least is None:
            return found == len(expected)
        if self.at_least > 0:
            return found >= self.at_least  # never, if there are fewer
        return found >= max(0, len(expected) + self.at_least)

    def plain(self) -> dict[str, object]:
        made: dict[str, object] = {"map": "rollup", "mapper": self.mapper.plain(), "window": self.window.plain()}
        return made if self.at_least is None else {**made, "at_least": self.at_least}


@dataclass(frozen=True, kw_only=True)
class FanOut(_Plain):
    """One partition leads to all those of a window."""

    mapper: Mapper
    window: Window
    writes: Mapper
    most: int = MOST_KEYS

    def downstream(self, key: str) -> list[str]:
        (coarse,) = self.mapper.downstream(key)
        return [self._text(each) for each in self.window.members(self.mapper.decode(coarse))]

    def _text(self, member: Decoded) -> str:
        if isinstance(self.writes, TimeKeys) and isinstance(member, datetime):
            return self.writes.format(member)
        return member.isoformat() if isinstance(member, datetime) else str(member)

    def date_of(self, key: str) -> datetime | None:
        return self.writes.date_of(key)

    def plain(self) -> dict[str, object]:
        return {
            "map": "fan_out",
            "mapper": self.mapper.plain(),
            "window": self.window.plain(),
            "writes": self.writes.plain(),
            "most": self.most,
        }


def mapper_text(mapper: Mapper) -> str:
    return json.dumps(mapper.plain(), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=4096)
def read_mapper(text: str) -> Mapper:
    """The mapper that `mapper_text` wrote."""
    try:
        return _read(json.loads(text), 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidSchedule(f"{text[:60]!r} is not a mapper of partitions") from None


def _read(raw: Mapping[str, object], depth: int) -> Mapper:
    if depth > _DEEPEST:
        raise ValueError(depth)
    match raw:
        case {"map": "same"}:
            return SameKey()
        case {"map": "only", "keys": list(keys)}:
            return OnlyKeys(keys=_texts(keys))
        case {"map": "one", "key": str(key)}:
            return OneKey(key=key)
        case {"map": "time", "period": str(period), "timezone": str(zone), "reads": str(reads), "writes": str(writes)}:
            find_zone(zone)
            return TimeKeys(period=Period(period), timezone=zone, reads=reads, writes=writes)
        case {"map": "chain", "parts": list(parts), "most": int(most)}:
            return Chain(parts=tuple(_read(each, depth + 1) for each in parts), most=most)
        case {"map": "product", "parts": list(parts), "delimiter": str(delimiter)}:
            return Product(parts=tuple(_read(each, depth + 1) for each in parts), delimiter=delimiter)
        case {"map": "rollup", "mapper": dict(mapper), "window": dict(window)}:
            least = raw.get("at_least")
            if least is not None and (not isinstance(least, int) or least == 0):
                raise ValueError(least)
            return Rollup(mapper=_read(mapper, depth + 1), window=_read_window(window), at_least=least)
        case {
            "map": "fan_out",
            "mapper": dict(mapper),
            "window": dict(window),
            "writes": dict(writes),
            "most": int(most),
        }:
            return FanOut(
                mapper=_read(mapper, depth + 1), window=_read_window(window), writes=_read(writes, depth + 1), most=most
            )
    raise ValueError(raw)


def _read_window(raw: Mapping[str, object]) -> Window:
    match raw:
        case {"keys": list(keys)}:
            return Segments(keys=_texts(keys))
        case {"period": str(period), "step": None | str() as step, "is_trailing": bool(is_trailing)}:
            return TimeWindow(
                period=Period(period), step=None if step is None else Period(step), is_trailing=is_trailing
            )
    raise ValueError(raw)


def _texts(raw: Sequence[object]) -> tuple[str, ...]:
    if len(raw) > MOST_SEGMENTS or not all(isinstance(each, str) for each in raw):
        raise ValueError(raw)
    return tuple(str(each) for each in raw)


def targets_of(mapper: Mapper, key: str) -> list[str]:
    """The partitions that an update of one counts for; InvalidSchedule says why it counts for none."""
    try:
        found = mapper.downstream(key)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise InvalidSchedule(f"partition {key!r} cannot be mapped: {error}") from None
    most = mapper.most if isinstance(mapper, FanOut | Chain) else MOST_KEYS
    if len(found) > most:
        raise InvalidSchedule(f"partition {key!r} leads to {len(found):,} partitions: at most {most:,} are allowed")
    return list(dict.fromkeys(map(check_key, found)))
