"""Schedules whose instants the user's code computes when its file is loaded. They are stored ahead, and more are appended
before they run out; a change of the code replaces those that are still to come."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec

MOST_AHEAD = 500
MOST_BEHIND = 400
_LONGEST_NAME = 400
_SHORTEST_RENEWAL = timedelta(minutes=1)
_LONGEST_RENEWAL = timedelta(days=1)


def timetable_name(code: object, module: str, name: str, state: str = "") -> str:
    """The name of a function or class, and a digest of its module and state: with another one, what is to come is computed anew."""
    try:
        source = inspect.getsource(inspect.getmodule(code) or code)  # type: ignore[arg-type]
    except (OSError, TypeError):
        source = ""
    digest = hashlib.sha256(f"{source}\0{state}".encode()).hexdigest()[:12]
    return f"{module}.{name}"[-_LONGEST_NAME:] + f"#{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """When a run is due, and the interval of data that it is for."""

    at: datetime
    start: datetime
    end: datetime


def with_instants(spec: ScheduleSpec, found: list[Instant]) -> ScheduleSpec:
    """Intervals are stored only if a run is for more than its own instant."""
    has_intervals = any((each.start, each.end) != (each.at, each.at) for each in found)
    return replace(
        spec,
        times=tuple(each.at for each in found) or None,
        intervals=tuple((each.start, each.end) for each in found) if has_intervals else None,
    )


def _instants_of(spec: ScheduleSpec) -> list[Instant]:
    times = spec.times or ()
    intervals = spec.intervals or tuple((at, at) for at in times)
    return [Instant(at=at, start=start, end=end) for at, (start, end) in zip(times, intervals, strict=True)]


def without_instants(spec: ScheduleSpec) -> ScheduleSpec:
    """What identifies the schedule, and makes the version of its DAG."""
    return spec if spec.kind is not ScheduleKind.COMPUTED else replace(spec, times=None, intervals=None)


def renewed(old: ScheduleSpec, new: ScheduleSpec) -> ScheduleSpec:
    """The stored instants with those after the last of them: of the same code, the ones that exist stay as they are."""
    if without_instants(old) != without_instants(new) or not old.times:
        return new
    if not new.times:
        return old
    more = [each for each in _instants_of(new) if each.at > old.times[-1]]
    return with_instants(old, (_instants_of(old) + more)[-(MOST_AHEAD + MOST_BEHIND) :]) if more else old


def renew_at(spec: ScheduleSpec, now: datetime) -> datetime | None:
    """When to load the file again: after half of the instants that are stored ahead. None for any other schedule."""
    if spec.kind is not ScheduleKind.COMPUTED:
        return None
    ahead = [at for at in spec.times or () if at > now]
    middle = ahead[len(ahead) // 2] if ahead else now + _LONGEST_RENEWAL
    return min(max(middle, now + _SHORTEST_RENEWAL), now + _LONGEST_RENEWAL)
