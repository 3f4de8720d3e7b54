"""What a change of the clock does to a schedule, in words."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_never

from evertick.cli.documents import iso
from evertick.domain.schedules.preview import ChangeEffect, ChangeOutcome
from evertick.domain.schedules.spec import ScheduleSpec
from evertick.domain.schedules.time_zones import find_zone


def effect_in_words(spec: ScheduleSpec, out: ChangeOutcome) -> str:
    """What happens, and why."""
    change = out.change
    kind = "missing" if change.is_gap else "repeated"
    match out.effect:
        case ChangeEffect.REAL_TIME:
            return "nothing: it counts elapsed time, whatever the clock shows"
        case ChangeEffect.NOTHING_DUE:
            return f"nothing: none of its times is among the {kind} ones"
        case ChangeEffect.RUNS_AFTER:
            return f"{_walls(out)} never happens: it fires once right after the gap, at {_at(spec, change.at)}"
        case ChangeEffect.SKIPPED if spec.cron.fields.is_elapsed:
            return f"{_walls(out)} never happens and does not fire: it keeps real time"
        case ChangeEffect.SKIPPED:
            return (
                f"{_walls(out)} never happens and is skipped: the gap of {_hours(change.shift)} is longer than 3 hours"
            )
        case ChangeEffect.FIRST_ONLY:
            return f"{_walls(out)} happens twice: it fires at the first, {_fires(spec, out)}"
        case ChangeEffect.BOTH:
            return f"{_walls(out)} happens twice and fires both times, {_fires(spec, out)}: it keeps real time"
    assert_never(out.effect)


def note_of(spec: ScheduleSpec, fire: datetime, outcomes: list[ChangeOutcome]) -> str | None:
    """What is special about a fire next to a change of the clock."""
    for out in outcomes:
        change = out.change
        if out.effect is ChangeEffect.RUNS_AFTER and fire == change.at:
            return f"for {_walls(out)}, which never happens"
        if out.effect not in (ChangeEffect.FIRST_ONLY, ChangeEffect.BOTH) or abs(fire - change.at) > -change.shift:
            continue
        if change.at <= fire < change.at - change.shift:
            return f"the second {fire.astimezone(find_zone(spec.timezone)):%H:%M} of that day"
        if change.at + change.shift <= fire < change.at:
            return f"the first {fire.astimezone(find_zone(spec.timezone)):%H:%M} of that day"
    return None


def wall(instant: datetime, spec: ScheduleSpec) -> str:
    return f"{instant.astimezone(find_zone(spec.timezone)):%Y-%m-%d %H:%M}"


def _walls(out: ChangeOutcome) -> str:
    is_long = abs(out.change.shift) > timedelta(hours=3)
    form = "%Y-%m-%d %H:%M" if is_long else "%H:%M:%S" if any(each.second for each in out.walls) else "%H:%M"
    shown = ", ".join(each.strftime(form) for each in out.walls)
    rest = out.wall_count - len(out.walls)
    return f"{shown} and {rest:,} more" if rest > 0 else shown


def _fires(spec: ScheduleSpec, out: ChangeOutcome) -> str:
    return " and ".join(iso(each) for each in out.fires) if len(out.fires) < 3 else f"from {iso(out.fires[0])} on"


def _at(spec: ScheduleSpec, instant: datetime) -> str:
    return f"{instant.astimezone(find_zone(spec.timezone)):%H:%M} ({iso(instant)})"


def _hours(length: timedelta) -> str:
    return f"{length.total_seconds() / 3600:g} hours"
