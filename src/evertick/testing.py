"""Tests for DAG authors: `simulate` returns the fires of a schedule between two instants, without a server, and `entered`
provides a context to a task's function.

Both use the engine's own rules and code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.durations import parse_duration
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import LONGEST_WINDOW_SECONDS, MOST_MISSED, MisfirePolicy, SkipReason
from evertick.domain.schedules.simulation import Policies, simulate_schedule
from evertick.domain.schedules.spec import parse_schedule
from evertick.domain.schedules.time_zones import find_zone, first_instant
from evertick.sdk.dag import DagDefinition
from evertick.sdk.runtime import CompiledDag, entered

__all__ = ["Fire", "Simulation", "SkippedFires", "entered", "simulate"]

DEFAULT_WINDOW_SECONDS = 86_400.0

Moment = datetime | str
Stretch = tuple[Moment, Moment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fire:
    """One run. `at` is its logical date, in UTC; `made_at` is later if the fire had to wait for a scheduler."""

    schedule: str
    at: datetime
    made_at: datetime
    timezone: str = "UTC"

    @property
    def local(self) -> datetime:
        """`at` on the clock of the schedule's time zone."""
        return self.at.astimezone(find_zone(self.timezone))


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFires:
    """`count` fires, from `first` to `last`, inclusive, that get no run, and why."""

    schedule: str
    first: datetime
    last: datetime
    count: int
    reason: SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The simulation: every fire in the order of its runs' creation, and every skipped range."""

    fires: tuple[Fire, ...]
    skips: tuple[SkippedFires, ...]

    @property
    def instants(self) -> list[datetime]:
        """The instants that got a run, in UTC."""
        return [fire.at for fire in self.fires]

    @property
    def local_times(self) -> list[str]:
        """The same as wall times of the zone: `2025-03-30 03:00`."""
        return [f"{fire.local:%Y-%m-%d %H:%M}" for fire in self.fires]


def simulate(
    subject: object,
    start: Moment,
    end: Moment,
    *,
    timezone: str | None = None,
    misfire: str | None = None,
    catchup_window: str | float | timedelta | None = None,
    down: Iterable[Stretch] = (),
    paused: Iterable[Stretch] = (),
) -> Simulation:
    """Simulate a DAG or a schedule from `start` to `end`, inclusive.

    `subject` is a function under `@dag`, a DAG, or any value for `schedule=`: "30 2 * * *", "@every 5m", a timedelta.
    Times are datetimes or texts; without an offset they are wall times in the schedule's zone.

    `down` are stretches (from, to) in which no scheduler ran: once it is back, `misfire` and `catchup_window` decide, as in
    `@dag` and its schedules. `paused` are stretches in which the DAG was paused: fires due in them are skipped. The work of a
    run, its duration, and limits such as `max_active_runs` are not simulated.
    """
    journeys = []
    for each, policies in _schedules(subject, timezone, misfire, catchup_window):
        zone = each.spec.timezone
        first, last = _instant(start, zone), _instant(end, zone)
        if last < first:
            raise UserError(f"the simulation ends at {end}, before it starts at {start}: swap them.")
        stretches = {
            "down": [(_instant(since, zone), _instant(until, zone)) for since, until in down],
            "paused": [(_instant(since, zone), _instant(until, zone)) for since, until in paused],
        }
        journeys.append((each, simulate_schedule(each.spec, policies, first=first, last=last, **stretches)))
    fires = [
        Fire(schedule=each.name, at=at, made_at=made_at, timezone=each.spec.timezone)
        for each, course in journeys
        for at, made_at in course.fires
    ]
    skips = [
        SkippedFires(schedule=each.name, first=skip.first, last=skip.last, count=skip.count, reason=skip.reason)
        for each, course in journeys
        for skip in course.skips
    ]
    return Simulation(
        fires=tuple(sorted(fires, key=lambda fire: (fire.made_at, fire.at, fire.schedule))),
        skips=tuple(sorted(skips, key=lambda skip: (skip.first, skip.schedule))),
    )


def _schedules(
    subject: object, timezone: str | None, misfire: str | None, window: str | float | timedelta | None
) -> Iterator[tuple[NamedSchedule, Policies]]:
    """The schedules to simulate, with their misfire policies."""
    spec = _dag_of(subject)
    if spec is None:
        plain = NamedSchedule(name="default", spec=parse_schedule(subject, timezone=timezone))
        spec = DagSpec(name=plain.name, tasks=(), schedules=(plain,))
    elif timezone is not None:
        raise UserError("a DAG's schedules have their own time zones: omit timezone.")
    policy = spec.misfire
    if misfire is not None:
        try:
            policy = MisfirePolicy(misfire)
        except ValueError:
            raise UserError(f"misfire {misfire!r} is unknown: use {', '.join(MisfirePolicy)}.") from None
    seconds = spec.catchup_window_seconds if window is None else _seconds(window)
    for each in spec.schedules:
        own = each.catchup_window_seconds if window is None else None
        within = own if own is not None else seconds
        if within is None:
            within = LONGEST_WINDOW_SECONDS if each.spec.catchup else DEFAULT_WINDOW_SECONDS
        own_policy = each.misfire or (MisfirePolicy.ALL if each.spec.catchup else policy)
        yield (
            each,
            Policies(
                misfire=own_policy if misfire is None else policy,
                window_seconds=within,
                most_missed=each.catchup_limit or spec.catchup_limit or MOST_MISSED,
            ),
        )


def _dag_of(subject: object) -> DagSpec | None:
    """A DAG without its tasks; None for a schedule."""
    match subject:
        case DagDefinition():
            return DagSpec(**subject.frame, tasks=())
        case CompiledDag():
            return subject.spec
        case DagSpec():
            return subject
        case _:
            return None


def _seconds(window: str | float | timedelta) -> float:
    if isinstance(window, timedelta):
        return window.total_seconds()
    if isinstance(window, str):
        try:
            return parse_duration(window).total_seconds()
        except ValueError as fault:
            raise UserError(f"catchup_window {window!r}: {fault}.") from None
    return float(window)


def _instant(moment: Moment, zone: str) -> datetime:
    try:
        read = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
        instant = first_instant(zone, read) if read.tzinfo is None else read.astimezone(UTC)
    except (ValueError, OverflowError, AttributeError):
        instant = None
    if instant is None:
        raise UserError(f"{moment!r} is not a date and time: write 2025-03-30 or 2025-03-30T02:30, or pass a datetime.")
    return instant
