"""Schedules that a function of the DAG file computes: given an instant, it returns the next one, or None. It is called when the
file is loaded to be published, and never in a scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TypeGuard

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.calendars import CalendarSchedule
from evertick.domain.schedules.computed import MOST_AHEAD, MOST_BEHIND, Instant, timetable_name
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, read_instant

Timetable = Callable[[datetime], datetime | None]
_TICK = timedelta(microseconds=1)


def is_timetable(schedule: object) -> TypeGuard[Timetable | CalendarSchedule]:
    return isinstance(schedule, CalendarSchedule) or inspect.isfunction(schedule) or inspect.ismethod(schedule)


def computed_fields(function: Timetable | CalendarSchedule) -> Mapping[str, object]:
    """The schedule as `parse_schedule` takes it. One on a calendar has its words as its name."""
    if isinstance(function, CalendarSchedule):
        return {"kind": ScheduleKind.COMPUTED, "timetable": f"{function.words[:400]}#{function.state[:12]}"}
    name = timetable_name(function, str(function.__module__), function.__qualname__)
    return {"kind": ScheduleKind.COMPUTED, "timetable": name}


def instants(function: Timetable | CalendarSchedule, spec: ScheduleSpec, now: datetime) -> list[Instant]:
    """The next ones, and with `catchup` the last ones since `start_at`."""
    found: list[Instant] = []
    at = spec.start_at - _TICK if spec.start_at is not None and (spec.catchup or spec.start_at > now) else now
    ahead = 0
    while ahead < MOST_AHEAD:
        following = function.next_after(at, spec.timezone) if isinstance(function, CalendarSchedule) else function(at)
        if following is None:
            break
        instant = read_instant("the next instant", following, spec.timezone)
        if instant is None or instant <= at:
            raise InvalidSchedule(
                f"it returned {following!r} for {at.isoformat()}: it must be a later instant, or None"
            )
        at, ahead = instant, ahead + (instant > now)
        found.append(Instant(at=at, start=at, end=at))
    return found[-(ahead + MOST_BEHIND) :]
