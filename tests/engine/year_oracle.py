"""What schedules must have done, told without the planner: every instant is listed by brute force, and a list is cut by the rules.

Shares with the program only the records that say what was asked for. A schedule's life is a list of instants, a mark up to
which they are settled, and what became of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec
from tests.domain import cron_oracle

# How often the clock is looked at: the minutes of every expression and every change of offset of these years are multiples.
_STEP = timedelta(minutes=5)
_ON_TIME = timedelta(seconds=10)
# What one call fires of a schedule: only where runs overlap does it matter how a long list is cut.
_CHUNK = 100
_MOST = 1000

Record = tuple[datetime, datetime, int, str]


@lru_cache(maxsize=8)
def _ticks(zone: str, begin: datetime, end: datetime) -> list[cron_oracle.Tick]:
    return cron_oracle.ticks_between(zone, begin, end, _STEP)


@lru_cache(maxsize=4096)
def _cron_instants(expression: str, zone: str, begin: datetime, end: datetime) -> tuple[datetime, ...]:
    return tuple(cron_oracle.fires(expression, _ticks(zone, begin, end)))


def instants_of(spec: ScheduleSpec, begin: datetime, end: datetime) -> list[datetime]:
    """Every instant from `begin` to `end`, one after the other."""
    match spec.kind:
        case ScheduleKind.CRON:
            assert spec.expression is not None
            found = list(_cron_instants(spec.expression, spec.timezone, begin - _STEP, end))
        case ScheduleKind.INTERVAL:
            assert spec.every_seconds is not None
            at, step = spec.anchor_at or datetime(1970, 1, 1, tzinfo=UTC), timedelta(seconds=spec.every_seconds)
            at += max((begin - at) // step, 0) * step
            found = []
            while at <= end:
                found.append(at)
                at += step
        case ScheduleKind.ONCE:
            found = [spec.at] if spec.at else []
        case ScheduleKind.TIMES:
            found = list(spec.times or ())
    return [
        at
        for at in found
        if begin <= at <= end and (not spec.start_at or at >= spec.start_at) and (not spec.end_at or at <= spec.end_at)
    ]


@dataclass
class Life:
    """One schedule. `delay` is told by the program's one formula; everything else is counted here."""

    begin: datetime
    end: datetime
    wanted: NamedSchedule | None = None
    delay: timedelta = timedelta(0)
    settled: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    instants: list[datetime] = field(default_factory=list)
    is_held: bool = False
    is_dag_paused: bool = False
    by_hand: bool = False
    is_new: bool = True
    open_runs: int = 0
    fires: list[datetime] = field(default_factory=list)
    skips: list[Record] = field(default_factory=list)

    def set(self, wanted: NamedSchedule, delay: timedelta, now: datetime) -> None:
        """Created, or changed: what was due is settled by the old rules, then the new ones hold."""
        self._close(now)
        self.instants = instants_of(wanted.spec, self.begin, self.end)
        if self.is_new and wanted.spec.kind in (ScheduleKind.ONCE, ScheduleKind.TIMES):
            self._skip([at for at in self.instants if at <= now], "past_when_published")
        self.is_new = False
        keeps = self.wanted is not None and _pattern(self.wanted.spec) == _pattern(wanted.spec)
        self.settled = now - self.delay if keeps else now
        self.wanted, self.delay = wanted, delay

    def remove(self, now: datetime) -> None:
        self._close(now)
        self.wanted, self.instants, self.is_held = None, [], False

    def pause(self, now: datetime, *, dag: bool) -> None:
        self.fire(now)
        if dag:
            self.is_dag_paused = True
        else:
            self.is_held = True

    def unpause(self, now: datetime, policy: str, window: float | None, *, dag: bool) -> None:
        was = self.is_paused
        if dag:
            self.is_dag_paused = False
        else:
            self.is_held = False
        if self.wanted is None or not was or self.is_paused:
            return
        if policy == "skip":
            self._skip(self._due(now), "paused")
            self.settled = max(self.settled, now - self.delay)
        else:
            self._settle(now, policy, window, chunk=_MOST)

    def fire(self, now: datetime) -> None:
        if self.wanted is not None and not self.is_paused:
            self._settle(now, str(self.wanted.misfire), None, chunk=_CHUNK)

    @property
    def is_paused(self) -> bool:
        return self.is_held or self.is_dag_paused

    def _close(self, now: datetime) -> None:
        if self.is_paused and self.wanted is not None:
            self._skip(self._due(now), "paused")
        self.fire(now)

    def _due(self, now: datetime) -> list[datetime]:
        low, high = bisect_right(self.instants, self.settled), bisect_right(self.instants, now - self.delay)
        return self.instants[low:high]

    def _settle(self, now: datetime, policy: str, window: float | None, *, chunk: int) -> None:
        due = self._due(now)
        self.settled = max(self.settled, now - self.delay)
        if not due:
            return
        assert self.wanted is not None
        own = self.wanted.catchup_window_seconds
        reach = timedelta(
            seconds=86_400 if window is None and own is None else window if window is not None else own or 0
        )
        oldest = now - self.delay - max(reach, _ON_TIME)
        young = [at for at in due if at >= oldest]
        punctual = [at for at in due if at >= now - self.delay - _ON_TIME]
        if policy == "all":
            most = self.wanted.catchup_limit or _MOST
            kept = young[-max(most, len(punctual)) :]
            self._skip(due[: len(due) - len(kept)], "over_limit" if len(young) > len(kept) else "outside_window")
            self._run(kept, chunk)
        elif not young:
            self._skip(due, "outside_window")
        elif policy == "skip" and len(due) > 1 and due[-1] < now - self.delay - _ON_TIME:
            self._skip(due, "misfire_skip")
        else:
            kept = punctual or due[-1:]
            self._skip(due[: len(due) - len(kept)], "misfire_skip" if policy == "skip" else "misfire_latest")
            self._run(kept, chunk)

    def _run(self, kept: list[datetime], chunk: int) -> None:
        """Which of them become runs, while as many are open as there are."""
        assert self.wanted is not None
        overlap = str(self.wanted.overlap or "allow")
        passed_over: list[datetime] = []
        for first in range(0, len(kept), chunk):
            part = kept[first : first + chunk]
            match overlap:
                case "cancel":
                    made, passed = part[-1:], part[:-1]
                    self.open_runs = 0
                case "skip" | "queue_one":
                    room = max((1 if overlap == "skip" else 2) - self.open_runs, 0)
                    made, passed = part[:room], part[room:]
                case _:
                    made, passed = part, []
            self.fires += made
            self.open_runs += len(made)
            # What is skipped in one part and goes on in the next is one range.
            if made:
                self._skip(passed_over, f"overlap_{overlap}")
                passed_over = []
            if overlap == "cancel":
                self._skip(passed, f"overlap_{overlap}")
            else:
                passed_over += passed
        self._skip(passed_over, f"overlap_{overlap}")

    def _skip(self, passed: list[datetime], reason: str) -> None:
        if passed:
            self.skips.append((passed[0], passed[-1], len(passed), reason))


def _pattern(spec: ScheduleSpec) -> tuple[object, ...]:
    return (
        spec.kind,
        spec.expression,
        spec.every_seconds,
        spec.at,
        spec.times,
        spec.timezone,
        spec.start_at,
        spec.end_at,
        spec.anchor_at,
    )
