"""A schedule: its fields, each parsed by itself and then validated together, and the instants at which it fires.

Pure: `next_after` takes the instant and never reads a clock.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import assert_never

from evertick.domain.durations import describe_duration, parse_duration
from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules import dependencies, events
from evertick.domain.schedules.cron import Cron, parse_cron
from evertick.domain.schedules.partition_keys import read_partitions
from evertick.domain.schedules.time_zones import EPOCH, find_zone, first_instant

_SHORTEST_INTERVAL = timedelta(milliseconds=50)


_LONGEST_INTERVAL = timedelta(days=36_525)


EARLIEST = datetime(1900, 1, 1, tzinfo=UTC)


_LONGEST_JITTER = timedelta(days=1)


_MOST_TIMES = 1000


_LONGEST_TIMETABLE = 500


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
    return dependencies.to_text(dependencies.read_text(str(raw)))


def read_event(raw: object) -> str:
    return events.to_text(events.read_text(str(raw)))


def read_jitter(raw: object) -> float | None:
    """The jitter in seconds, exact to the millisecond; zero is the same as omitted."""
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise InvalidSchedule(f"jitter {raw!r:.40} is not a number of seconds: write one such as 30")
    if not 0 <= raw <= _LONGEST_JITTER.total_seconds():
        raise InvalidSchedule(f"a jitter of {raw} s is not allowed: it must be between 0 s and one day")
    return round(float(raw), 3) or None


def read_catchup(raw: object) -> bool | None:
    if not isinstance(raw, bool):
        raise InvalidSchedule(f"catchup {raw!r:.40} is not allowed: it is True or False")
    return raw or None


def read_timetable(raw: object) -> str:
    if not isinstance(raw, str) or not 0 < len(raw) <= _LONGEST_TIMETABLE or not raw.isprintable():
        raise InvalidSchedule(f"timetable {raw!r:.40} is not a name of at most {_LONGEST_TIMETABLE} characters")
    return raw


def read_intervals(raw: object) -> tuple[tuple[datetime, datetime], ...]:
    found = []
    for each in raw if isinstance(raw, list | tuple) else ():
        start, end = (read_instant("intervals", part, "UTC") for part in each)
        assert start is not None and end is not None, "the interval of an instant has two ends"
        found.append((start, end))
    return tuple(found)


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


_TICK = timedelta(microseconds=1)


_LONGEST_TEXT = 256


_EXAMPLES = "'30 2 * * *', '@daily', '@every 30s', 'PT5M' or '@once 2030-01-01T00:00:00Z'"


class ScheduleKind(StrEnum):
    CRON = "cron"
    INTERVAL = "interval"
    ONCE = "once"
    TIMES = "times"
    AFTER = "after"
    COMPUTED = "computed"
    EVENT = "event"


_OWN_FIELD = {
    ScheduleKind.CRON: "expression",
    ScheduleKind.INTERVAL: "every_seconds",
    ScheduleKind.ONCE: "at",
    ScheduleKind.TIMES: "times",
    ScheduleKind.AFTER: "after",
    ScheduleKind.COMPUTED: "timetable",
    ScheduleKind.EVENT: "event",
}


_BOUNDS = frozenset(("start_at", "end_at", "jitter_seconds", "catchup"))


_FITTING = {
    kind: frozenset(("kind", "timezone", own))
    | (frozenset() if kind in (ScheduleKind.AFTER, ScheduleKind.EVENT) else _BOUNDS | {"partitions"})
    | (frozenset(("anchor_at",)) if kind is ScheduleKind.INTERVAL else frozenset())
    | (frozenset(("times", "intervals")) if kind is ScheduleKind.COMPUTED else frozenset())
    for kind, own in _OWN_FIELD.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A validated schedule, created by `parse_schedule`. The bounds are inclusive; the default anchor is 1970-01-01.
    A computed one names its `timetable`; its `times`, and the `intervals` that their runs are for, are stored ahead.
    With `catchup` a schedule begins at its first instant, even if that is past when it is first published. `partitions`: each run
    is for one, see run_partitions.py.

    `jitter_seconds` spreads schedules that fire at the same instant: the delay of each is fixed, see domain/schedules/misfire.py.
    """

    kind: ScheduleKind
    expression: str | None = None
    every_seconds: float | None = None
    at: datetime | None = None
    timezone: str = "UTC"
    start_at: datetime | None = None
    end_at: datetime | None = None
    anchor_at: datetime | None = None
    times: tuple[datetime, ...] | None = None
    after: str | None = None
    jitter_seconds: float | None = None
    catchup: bool | None = None
    timetable: str | None = None
    intervals: tuple[tuple[datetime, datetime], ...] | None = None
    event: str | None = None
    partitions: str | None = None

    def to_json(self) -> str:
        """Canonical text: equal schedules give equal bytes. Sorted keys, no spaces, only what is set."""
        given = _set({each.name: getattr(self, each.name) for each in fields(self)})
        return json.dumps({name: _plain(value) for name, value in given.items()}, sort_keys=True, separators=(",", ":"))

    @property
    def cron(self) -> Cron:
        assert self.expression is not None, "parse_schedule gives every cron schedule its expression"
        return _parsed_cron(self.expression, self.timezone)

    @property
    def every(self) -> timedelta:
        assert self.every_seconds is not None, "parse_schedule gives every interval its length"
        return timedelta(seconds=self.every_seconds)

    @property
    def anchor(self) -> datetime:
        return self.anchor_at or EPOCH

    @property
    def instants(self) -> tuple[datetime, ...]:
        """All instants of a schedule that lists them, or its only one."""
        if self.at is not None:
            return (self.at,)
        return self.times or ()  # a computed one may have none yet

    @classmethod
    def from_json(cls, text: str) -> ScheduleSpec:
        """Parse and validate the schedule that `to_json` wrote."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidSchedule(f"schedule {text[:40]!r} is not JSON: store the output of `to_json`") from None
        if not isinstance(raw, dict):
            raise InvalidSchedule(f"schedule {text[:40]!r} is not a JSON object: store the output of `to_json`")
        return _checked(_set(raw))


def parse_schedule(
    raw: object,
    *,
    timezone: str | None = None,
    start_at: datetime | None = None,
    end_at: datetime | None = None,
    anchor_at: datetime | None = None,
    jitter_seconds: float | None = None,
    catchup: bool | None = None,
) -> ScheduleSpec:
    """Parse and validate any accepted form: text, a `timedelta`, a `datetime`, a list of those, or the fields that
    `to_json` writes.

    Naive datetimes are wall times in the schedule's zone. The raw fields take precedence over the arguments,
    and a schedule that was already parsed is returned unchanged.
    """
    if isinstance(raw, ScheduleSpec):
        return raw
    bounds = {"start_at": start_at, "end_at": end_at, "anchor_at": anchor_at}
    asked = {"timezone": timezone, **bounds, "jitter_seconds": jitter_seconds, "catchup": catchup}
    return _checked(_set(asked) | _set(_fields_of(raw)))


def with_partitions(spec: ScheduleSpec, partitions: str) -> ScheduleSpec:
    """The same schedule, whose runs are each for a partition."""
    return ScheduleSpec.from_json(json.dumps({**json.loads(spec.to_json()), "partitions": partitions}))


def next_after(spec: ScheduleSpec, instant: datetime) -> datetime | None:
    """The first fire strictly after `instant`, or None when the schedule has ended."""
    instant = instant if spec.start_at is None else max(instant, spec.start_at - _TICK)
    found = None
    match spec.kind:
        case ScheduleKind.CRON:
            found = _next_of_cron(spec.expression or "", spec.timezone, instant)
        case ScheduleKind.INTERVAL:
            with suppress(OverflowError):
                found = spec.anchor + ((instant - spec.anchor) // spec.every + 1) * spec.every
        case ScheduleKind.ONCE | ScheduleKind.TIMES | ScheduleKind.COMPUTED:
            place = bisect_right(spec.instants, instant)
            found = spec.instants[place] if place < len(spec.instants) else None
        case ScheduleKind.AFTER | ScheduleKind.EVENT:
            pass  # never due by time alone
        case _:
            assert_never(spec.kind)
    return None if found is None or (spec.end_at is not None and found > spec.end_at) else found


def describe(spec: ScheduleSpec) -> str:
    """A description for people that promises no particular next time."""
    match spec.kind:
        case ScheduleKind.CRON:
            words = f"cron {spec.expression} ({spec.timezone})"
        case ScheduleKind.AFTER:
            words = f"after {dependencies.in_words(dependencies.read_text(spec.after or ''))}"
        case ScheduleKind.EVENT:
            words = events.in_words(events.read_text(spec.event or ""))
        case ScheduleKind.INTERVAL:
            words = f"every {describe_duration(spec.every)}"
        case ScheduleKind.ONCE:
            words = f"once at {_in_zone(spec, spec.instants[0])} ({spec.timezone})"
        case ScheduleKind.COMPUTED:
            words = f"timetable {(spec.timetable or '').partition('#')[0]}"
            if spec.instants:
                words += f", computed until {_in_zone(spec, spec.instants[-1])}"
        case ScheduleKind.TIMES:
            first, last = spec.instants[0], spec.instants[-1]
            words = (
                f"{len(spec.instants)} times from {_in_zone(spec, first)} to {_in_zone(spec, last)} ({spec.timezone})"
            )
        case _:
            assert_never(spec.kind)
    if spec.start_at is not None:
        words += f", from {_in_zone(spec, spec.start_at)}"
    if spec.end_at is not None:
        words += f", until {_in_zone(spec, spec.end_at)}"
    if spec.jitter_seconds:
        length = describe_duration(timedelta(seconds=spec.jitter_seconds))
        words += f", up to {length if length[0].isdigit() else f'1 {length}'} later"
    return words


# As many entries as fire in one tick of a large installation: about 0.4 kB each, against 20 us to parse one again.
_parsed_cron = lru_cache(maxsize=16_384)(parse_cron)


# Schedules that are due together are often alike, and then they share the next fire.
@lru_cache(maxsize=1024)
def _next_of_cron(expression: str, timezone: str, instant: datetime) -> datetime | None:
    return _parsed_cron(expression, timezone).next_after(instant)


def _fields_of(raw: object) -> Mapping[str, object]:
    """The fields of a `ScheduleSpec`, not yet validated."""
    match raw:
        case str():
            return _fields_of_text(raw)
        case timedelta():
            return {"kind": ScheduleKind.INTERVAL, "every_seconds": raw.total_seconds()}
        case datetime():
            return {"kind": ScheduleKind.ONCE, "at": raw}
        case Mapping():
            return {str(name): value for name, value in raw.items()}
        case dependencies.Condition() | dependencies.Source():
            return {"kind": ScheduleKind.AFTER, "after": dependencies.to_text(raw)}
        case events.EventTrigger():
            return {"kind": ScheduleKind.EVENT, "event": events.to_text(raw)}
        case list() | tuple() | set() | frozenset():
            return {"kind": ScheduleKind.TIMES, "times": raw}
        case _:
            raise InvalidSchedule(f"a schedule cannot be a {type(raw).__name__}: write {_EXAMPLES}, or a timedelta")


def _fields_of_text(text: str) -> Mapping[str, object]:
    text = text.strip()
    if len(text) > _LONGEST_TEXT:
        raise InvalidSchedule(
            f"schedule {text[:40]!r}… has {len(text)} characters: at most {_LONGEST_TEXT} are allowed"
        )
    if not text:
        raise InvalidSchedule(f"the schedule is empty: write {_EXAMPLES}")
    word, _, rest = text.partition(" ")
    if word.lower() == "@once":
        return {"kind": ScheduleKind.ONCE, "at": rest.strip()}
    if word.lower() != "@every" and not text.upper().startswith("P"):
        return {"kind": ScheduleKind.CRON, "expression": text}
    try:
        length = parse_duration(rest if word.lower() == "@every" else text)
    except ValueError as fault:
        raise InvalidSchedule(f"schedule {text!r}: {fault}") from None
    return {"kind": ScheduleKind.INTERVAL, "every_seconds": length.total_seconds()}


def _checked(given: Mapping[str, object]) -> ScheduleSpec:
    """Validate every field by itself, then all together; `given` has no empty fields."""
    try:
        kind = ScheduleKind(str(given.get("kind")))
    except ValueError:
        raise InvalidSchedule(
            f"schedule kind {given.get('kind')!r:.40} is unknown: use {', '.join(ScheduleKind)}"
        ) from None
    if _OWN_FIELD[kind] not in given or given.keys() - _FITTING[kind]:
        odd = ", ".join(sorted(given.keys() - _FITTING[kind]))[:80]
        raise InvalidSchedule(
            f"a schedule of kind {kind} needs {_OWN_FIELD[kind]!r}"
            + (f" and cannot have {odd}: remove it" if odd else "")
        )
    zone = given.get("timezone", "UTC")
    if not isinstance(zone, str):
        raise InvalidSchedule(f"time zone {zone!r:.40} is not text: write a name such as 'Europe/Berlin'")
    find_zone(zone)
    spec = ScheduleSpec(
        kind=kind,
        expression=_expression(given["expression"], zone) if "expression" in given else None,
        every_seconds=read_interval(given["every_seconds"]) if "every_seconds" in given else None,
        at=read_instant("at", given["at"], zone) if "at" in given else None,
        timezone=zone,
        start_at=read_instant("start_at", given["start_at"], zone) if "start_at" in given else None,
        end_at=read_instant("end_at", given["end_at"], zone) if "end_at" in given else None,
        anchor_at=read_instant("anchor_at", given["anchor_at"], zone) if "anchor_at" in given else None,
        times=read_times(given["times"], zone) if "times" in given else None,
        after=read_condition(given["after"]) if "after" in given else None,
        jitter_seconds=read_jitter(given["jitter_seconds"]) if "jitter_seconds" in given else None,
        catchup=read_catchup(given["catchup"]) if "catchup" in given else None,
        timetable=read_timetable(given["timetable"]) if "timetable" in given else None,
        intervals=read_intervals(given["intervals"]) if "intervals" in given else None,
        event=read_event(given["event"]) if "event" in given else None,
        partitions=read_partitions(str(given["partitions"])).to_text() if "partitions" in given else None,
    )
    return _within_bounds(spec)


def _expression(raw: object, zone: str) -> str:
    if not isinstance(raw, str):
        raise InvalidSchedule(f"cron expression {raw!r:.40} is not text: write one such as '30 2 * * *'")
    return _parsed_cron(raw, zone).expression


def _within_bounds(spec: ScheduleSpec) -> ScheduleSpec:
    """Refuse bounds within which the schedule never fires."""
    start, end = spec.start_at, spec.end_at
    if spec.catchup and start is None and spec.kind in (ScheduleKind.CRON, ScheduleKind.INTERVAL):
        raise InvalidSchedule("catchup runs every fire since start_at, and there is none: write start_at")
    if (start is None and end is None) or spec.kind is ScheduleKind.COMPUTED:
        return spec
    if start is not None and end is not None and end < start:
        raise InvalidSchedule(f"the schedule ends at {_iso(end)}, before it starts at {_iso(start)}: swap them")
    if next_after(spec, EARLIEST - _TICK) is None:
        raise InvalidSchedule(
            f"the schedule ({describe(spec)}) never fires within its bounds: widen start_at and end_at"
        )
    return spec


def _set(given: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in given.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return _iso(value) if isinstance(value, datetime) else value


def _iso(instant: datetime) -> str:
    return instant.isoformat().replace("+00:00", "Z")


def _in_zone(spec: ScheduleSpec, instant: datetime) -> str:
    return instant.astimezone(find_zone(spec.timezone)).isoformat(sep=" ")
