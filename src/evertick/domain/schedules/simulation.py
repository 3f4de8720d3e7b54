"""Simulates a schedule over a time range, with outages and pauses: which fires become runs and which are skipped. Decides with
`plan_fires`, as the engine does, and has no rules of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum

from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import MisfirePolicy, SkipRange, SkipReason, never_was, plan_fires, skip_until
from evertick.domain.schedules.spec import ScheduleSpec, next_after

MOST_FIRES = 100_000
_TICK = timedelta(microseconds=1)
_FIRES_PER_CALL = 100

Stretch = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    misfire: MisfirePolicy
    window_seconds: float | None
    most_missed: int | None = None


@dataclass(slots=True)
class ScheduleSimulation:
    """The result: fires as (nominal instant, creation time of the run), skips, and the instant that is due next."""

    fires: list[tuple[datetime, datetime]] = field(default_factory=list)
    skips: list[SkipRange] = field(default_factory=list)
    next_due: datetime | None = None


class _Turn(IntEnum):
    """The kinds of changes at an instant; simultaneous ones are applied in this order."""

    UP = 0
    UNPAUSE = 1
    PAUSE = 2
    DOWN = 3


def simulate_schedule(
    spec: ScheduleSpec,
    policies: Policies,
    *,
    first: datetime,
    last: datetime,
    down: Iterable[Stretch] = (),
    paused: Iterable[Stretch] = (),
) -> ScheduleSimulation:
    """Simulate from `first` to `last`, inclusive. Down means that no scheduler runs: fires that fall due meanwhile are decided
    when one is up again. A pause first decides the due fires and then fires nothing; its end skips everything in between."""
    result = ScheduleSimulation(next_due=next_after(spec, first - _TICK))
    simulator = _Simulator(spec, policies, result)
    for at, turn in _turns(first, last, down, paused):
        simulator.take(at, turn)
    simulator.go_on(last)
    return result


class _Simulator:
    def __init__(self, spec: ScheduleSpec, policies: Policies, result: ScheduleSimulation) -> None:
        self._spec, self._policies, self._result = spec, policies, result
        self._is_up, self._is_paused = True, False

    def take(self, at: datetime, turn: _Turn) -> None:
        self.go_on(at - _TICK)
        match turn:
            case _Turn.UP:
                self._is_up = True
                if not self._is_paused:
                    self._settle(at)
            case _Turn.DOWN:
                self._is_up = False
            case _Turn.PAUSE:
                self._settle(at)
                self._is_paused = True
            case _Turn.UNPAUSE:
                self._skip(at)
                self._is_paused = False

    def go_on(self, until: datetime) -> None:
        """While the scheduler is up and the schedule not paused, everything fires the moment it is due."""
        while self._is_up and not self._is_paused:
            due = self._result.next_due
            if due is None or due > until:
                return
            self._settle(due)

    def _settle(self, now: datetime) -> None:
        """Decide everything that is due, as a scheduler or a pause does."""
        result = self._result
        while result.next_due is not None and result.next_due <= now:
            plan = plan_fires(
                self._spec,
                next_due=result.next_due,
                now=now,
                policy=self._policies.misfire,
                window_seconds=self._policies.window_seconds,
                limit=_FIRES_PER_CALL,
                most_missed=self._policies.most_missed,
            )
            result.fires += [(at, now) for at in plan.fires]
            result.skips += [each for each in (plan.skipped, plan.missing) if each]
            result.next_due = plan.next_due
            if len(result.fires) > MOST_FIRES:
                raise UserError(f"That is more than {MOST_FIRES:,} fires: choose a shorter time range.")

    def _skip(self, now: datetime) -> None:
        """Record the fires that a pause suppressed as skipped when it ends."""
        result = self._result
        skipped = skip_until(self._spec, next_due=result.next_due, now=now, reason=SkipReason.PAUSED)
        if skipped is not None:
            following = next_after(self._spec, now)
            missing = never_was(self._spec, skipped.first, following)
            result.skips += [skipped, *([missing] if missing else [])]
            result.next_due = following


def _turns(
    first: datetime, last: datetime, down: Iterable[Stretch], paused: Iterable[Stretch]
) -> list[tuple[datetime, _Turn]]:
    """The changes within the range, in order."""
    turns: list[tuple[datetime, _Turn]] = []
    for stretches, begin, end in ((down, _Turn.DOWN, _Turn.UP), (paused, _Turn.PAUSE, _Turn.UNPAUSE)):
        for since, until in _merged(stretches):
            turns += [(max(since, first), begin), (until, end)]
    return sorted((at, turn) for at, turn in turns if first <= at <= last)


def _merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The stretches without overlaps, so that the end of one does not end another."""
    merged: list[Stretch] = []
    for since, until in sorted(stretches):
        if until <= since:
            raise UserError(f"a stretch from {since.isoformat()} to {until.isoformat()} is empty: swap its ends.")
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged
