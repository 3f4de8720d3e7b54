"""What each schedule had to do at which instant, from its published versions and pauses and a second cron of our own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.chaos import expected
from tests.chaos.case import Case
from tests.chaos.evidence import ScheduleMove, ScheduleVersion
from tests.chaos.record import Phase

# What a spec can do to its reader. The program sets such schedules aside; here they are counted and left out.
_MEMO = "timetables"
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, AssertionError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """A stretch of time in which one version of a schedule was in force, paused or not."""

    version: ScheduleVersion
    from_at: datetime
    from_ns: int
    until_at: datetime
    is_paused: bool
    is_quarantined: bool
    is_last: bool
    is_resumed: bool  # the same version goes on after this pause


@dataclass(slots=True, kw_only=True)
class Timetable:
    """What one schedule was expected to do. `fires` and `skips` are due for certain; `either` were due while it changed."""

    schedule_id: int
    dag: str
    name: str
    policy: str
    fires: dict[datetime, Era] = field(default_factory=dict)
    skips: dict[datetime, Era] = field(default_factory=dict)
    either: dict[datetime, Era] = field(default_factory=dict)
    is_readable: bool = True
    eras: list[Era] = field(default_factory=list)

    def knows(self, instant: datetime) -> bool:
        return instant in self.fires or instant in self.skips or instant in self.either


def timetables(case: Case) -> list[Timetable]:
    """Of every schedule, reckoned once per case."""
    if _MEMO not in case.memo:
        case.memo[_MEMO] = _timetables(case)
    found: list[Timetable] = case.memo[_MEMO]
    return found


def _timetables(case: Case) -> list[Timetable]:
    found = []
    for schedule_id, eras in sorted(_eras(case).items()):
        first = eras[-1].version
        table = Timetable(schedule_id=schedule_id, dag=first.dag, name=first.name, policy=first.misfire, eras=eras)
        for era in eras:
            try:
                _fill(case, table, era)
            except UNREADABLE:
                table.is_readable = False
        found.append(table)
    return found


def _fill(case: Case, table: Timetable, era: Era) -> None:
    """Add what was due in this era. Around its borders, where the clock was read before the commit, it may be either."""
    edit = timedelta(seconds=case.limits.edit_seconds)
    settled = timedelta(seconds=case.limits.fire_tolerance_seconds + case.limits.recovery_seconds)
    certain_until = max(era.until_at - settled, _drained_at(case)) if era.is_last else era.until_at - edit
    for instant in expected.fires(era.version.spec, era.from_at - edit, era.until_at):
        if era.is_quarantined or not era.from_at < instant <= certain_until:
            kind = table.either
        elif era.is_paused:
            kind = table.skips if era.is_resumed and instant > era.from_at + edit else table.either
        else:
            kind = table.fires
        if kind is not table.either:
            table.either.pop(instant, None)
            kind[instant] = era
        elif not table.knows(instant):
            kind[instant] = era


def _drained_at(case: Case) -> datetime:
    """Until when all that was due is surely settled: it was idle after the last fault, with nothing due or left to do. A tick
    or two before that, where the clocks are compared."""
    healed_ns, idle_ns = case.evidence.nemesis.phase_ns(Phase.HEALED), case.evidence.nemesis.phase_ns(Phase.IDLE)
    if healed_ns is None or idle_ns is None or idle_ns < healed_ns:
        return datetime.min.replace(tzinfo=UTC)
    return case.clock.wall_at(idle_ns) - timedelta(seconds=2 * case.limits.tick_seconds)


def _eras(case: Case) -> dict[int, list[Era]]:
    versions = {(each.schedule_id, each.version): each for each in case.evidence.schedule_versions}
    moves: dict[int, list[ScheduleMove]] = defaultdict(list)
    for move in case.evidence.schedule_moves:
        moves[move.schedule_id].append(move)
    found = {schedule_id: list(_eras_of(case, each, versions)) for schedule_id, each in moves.items()}
    return {schedule_id: eras for schedule_id, eras in found.items() if eras}


def _eras_of(case: Case, moves: list[ScheduleMove], versions: dict[tuple[int, int], ScheduleVersion]) -> Iterator[Era]:
    borders = [moves[0]]
    for move in moves[1:]:
        last = borders[-1]
        if (move.version, move.is_paused, move.error) != (last.version, last.is_paused, last.error):
            borders.append(move)
    quarantined = {move.version for move in moves if move.error is not None}
    seen = [at for at in (case.evidence.read_at, case.clock.latest_at if case.clock else None) if at is not None]
    horizon = max(seen, default=moves[-1].at)
    for place, border in enumerate(borders):
        after = borders[place + 1] if place + 1 < len(borders) else None
        version = versions.get((border.schedule_id, border.version)) if border.version is not None else None
        if version is None or version.is_deleted:
            continue
        yield Era(
            version=version,
            from_at=border.at,
            from_ns=border.at_ns,
            until_at=horizon if after is None else after.at,
            is_paused=bool(border.is_paused),
            is_quarantined=border.version in quarantined,
            is_last=after is None,
            is_resumed=after is not None and after.version == border.version and not after.is_paused,
        )
