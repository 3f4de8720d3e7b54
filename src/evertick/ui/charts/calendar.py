"""A DAG's runs per day for one year, and failures by hour of the week. Pure: takes counts, returns cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from evertick.db.queries.overview import RunLength, RunsOfHour

DAYS_SHOWN = 371  # 53 whole weeks
# The first of these states that occurred decides a cell's state.
_WORST_FIRST = ("failed", "canceled", "running", "queued", "success")


@dataclass(frozen=True, slots=True)
class Day:
    """One day; `week` and `weekday` are its column and row."""

    day: date
    week: int
    weekday: int
    total: int
    states: dict[str, int]
    state: str | None
    # 0 (no runs) to 4: the number of runs relative to the day with the most runs.
    level: int

    @property
    def failed_share(self) -> float:
        return self.states.get("failed", 0) / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Month:
    week: int
    name: str


@dataclass(frozen=True, slots=True)
class Hour:
    weekday: int
    hour: int
    total: int
    failed: int
    level: int


@dataclass(frozen=True, slots=True)
class Year:
    days: Sequence[Day]
    months: Sequence[Month]
    hours: Sequence[Hour]
    total: int
    failed: int


@dataclass(frozen=True, slots=True)
class DurationColumn:
    """A run in the chart of durations. Heights are percentages of the tallest; the waiting time is below the running time."""

    run: RunLength
    waited_seconds: float
    ran_seconds: float
    waited: float
    ran: float


@dataclass(frozen=True, slots=True)
class Durations:
    columns: Sequence[DurationColumn]
    tallest_seconds: float
    median_seconds: float | None


def year_of(counts: Iterable[RunsOfHour], *, today: date) -> Year:
    """Build the calendar. The hours of `counts` and `today` are in the display time zone."""
    by_day: dict[date, Counter[str]] = defaultdict(Counter)
    by_hour: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for each in counts:
        by_day[each.hour.date()][each.state] += each.runs
        by_hour[each.hour.weekday(), each.hour.hour][each.state] += each.runs
    first = today - timedelta(days=today.weekday()) - timedelta(weeks=52)
    fullest = max((sum(states.values()) for states in by_day.values()), default=0)
    days = []
    for offset in range((today - first).days + 1):
        day = first + timedelta(days=offset)
        states = dict(by_day.get(day, {}))
        total = sum(states.values())
        worst = next((state for state in _WORST_FIRST if states.get(state)), None)
        days.append(Day(day, offset // 7, offset % 7, total, states, worst, _level(total, fullest)))
    months = [
        Month(day.week, f"{day.day:%b}") for day in days if day.weekday == 0 and day.day.day <= 7 and day.week < 52
    ]
    busiest = max((sum(states.values()) for states in by_hour.values()), default=0)
    hours = []
    for weekday in range(7):
        for hour in range(24):
            states = dict(by_hour.get((weekday, hour), {}))
            total = sum(states.values())
            hours.append(Hour(weekday, hour, total, states.get("failed", 0), _level(total, busiest)))
    return Year(days, months, hours, sum(day.total for day in days), sum(day.states.get("failed", 0) for day in days))


def durations_of(runs: Sequence[RunLength], *, now: datetime) -> Durations:
    """Build the chart, oldest run first, from `runs`, which come newest first."""
    spans = []
    for run in reversed(runs):
        began = run.started_at or run.finished_at or now
        waited = max((began - (run.cleared_at or run.created_at)).total_seconds(), 0.0)
        ran = max(((run.finished_at or now) - began).total_seconds(), 0.0)
        spans.append((run, waited, ran))
    tallest = max((waited + ran for _, waited, ran in spans), default=0.0)
    share = 100 / tallest if tallest > 0 else 0.0
    columns = [
        DurationColumn(run, waited, ran, round(waited * share, 2), round(ran * share, 2)) for run, waited, ran in spans
    ]
    ended = sorted(ran for run, _, ran in spans if run.finished_at is not None)
    return Durations(columns, tallest, ended[len(ended) // 2] if ended else None)


def _level(count: int, most: int) -> int:
    return 0 if count == 0 else min(4, 1 + (4 * (count - 1)) // max(most, 1))
