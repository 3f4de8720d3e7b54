"""J1 one run per fire, J2 every fire has its run or its skip record, J3 in time. In the tables and in the effect log."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.case import Case
from tests.chaos.checks.eras import Timetable, timetables
from tests.chaos.checks.matching import match
from tests.chaos.effects import Effect
from tests.chaos.evidence import RunFact, Skip
from tests.chaos.verdict import Finding

_ALL = "all"
# No change of leader takes this long, so that what is no later counts as punctual.
_ON_TIME = timedelta(seconds=10)
# Recorded for a one-time schedule that was over before it was published: no fire was ever due.
_NEVER_DUE = "past_when_published"


def j1(case: Case, finding: Finding) -> None:
    """No two runs per (schedule, fire)."""
    runs: dict[tuple[int, datetime], list[int]] = defaultdict(list)
    for run in case.evidence.runs:
        if run.schedule_id is not None and run.fire_at is not None:
            runs[run.schedule_id, run.fire_at].append(run.run_id)
    finding.looked_at("fires in the tables", len(runs))
    for (schedule, fire_at), ids in runs.items():
        if len(ids) > 1:
            finding.violated("two_runs", f"schedule {schedule} at {fire_at} has runs {ids}", runs=ids)
    names = _Names(case)
    bodies: dict[tuple[str, str, datetime], set[int]] = defaultdict(set)
    for effect in case.evidence.effects:
        name = names.of(effect)
        if effect.fire_at is not None and name is not None:
            bodies[effect.dag, name, effect.fire_at].add(effect.run_id)
    finding.looked_at("fires in the effect log", len(bodies))
    for (dag, schedule_name, fire_at), found in bodies.items():
        if len(found) > 1:
            finding.violated(
                "two_runs_in_effects", f"{dag} ({schedule_name}) at {fire_at} had bodies of runs {sorted(found)}"
            )


def j2(case: Case, finding: Finding) -> None:
    """Each expected fire has exactly one run or one skip record, and nothing else has either."""
    runs: dict[int, set[datetime]] = defaultdict(set)
    for run in case.evidence.runs:
        if run.schedule_id is not None and run.fire_at is not None:
            runs[run.schedule_id].add(run.fire_at)
    skips = _skips(case)
    for table in timetables(case):
        finding.counts["schedules"] += 1
        if table.is_readable:
            _compare(finding, table, runs[table.schedule_id], skips.get(table.schedule_id, Skips([])))
        else:
            finding.counts["unreadable schedules"] += 1
    for move in case.evidence.schedule_moves:
        if move.is_same_version and move.old_due and move.new_due and move.new_due < move.old_due:
            finding.violated(
                "cursor_went_back", f"schedule {move.schedule_id} went from {move.old_due} back to {move.new_due}"
            )
    for bodies in _bodies(case):
        _compare_bodies(case, finding, bodies)


class Skips:
    """The skip records of one schedule."""

    def __init__(self, records: Iterable[Skip]) -> None:
        self.records = sorted(record for record in records if record.reason != _NEVER_DUE)
        self._starts = [record.first_at for record in self.records]

    def cover(self, instant: datetime) -> bool:
        place = bisect_right(self._starts, instant) - 1
        return place >= 0 and self.records[place].last_at >= instant


def _skips(case: Case) -> dict[int, Skips]:
    found: dict[int, list[Skip]] = defaultdict(list)
    for skip in case.evidence.skips:
        found[skip.schedule_id].append(skip)
    return {schedule_id: Skips(records) for schedule_id, records in found.items()}


def _compare(finding: Finding, table: Timetable, runs: set[datetime], skips: Skips) -> None:
    who = f"schedule {table.schedule_id} ({table.dag}, {table.name})"
    finding.looked_at("expected fires", len(table.fires) + len(table.skips))
    for instant in table.fires:
        if instant not in runs and not skips.cover(instant):
            finding.violated("missed", f"{who} at {instant}: neither a run nor a skip record")
    for instant in table.skips:
        if instant not in runs and not skips.cover(instant):
            finding.violated("missed", f"{who} at {instant}: paused, and no skip record")
    for instant in sorted(runs):
        if skips.cover(instant):
            finding.violated("run_and_skip", f"{who} at {instant}: a run and a skip record")
        elif not table.knows(instant):
            finding.violated("unexpected", f"{who} at {instant}: a run that nothing asked for")
        elif instant in table.skips:
            finding.violated("unexpected", f"{who} at {instant}: a run although it was paused")
    for earlier, later in pairwise(skips.records):
        if later.first_at <= earlier.last_at:
            finding.violated("skipped_twice", f"{who}: {later.first_at} is in two skip records")
    certain, perhaps = sorted([*table.fires, *table.skips]), sorted(table.either)
    for skip in skips.records:
        finding.looked_at("skip records")
        least = bisect_right(certain, skip.last_at) - bisect_left(certain, skip.first_at)
        most = least + bisect_right(perhaps, skip.last_at) - bisect_left(perhaps, skip.first_at)
        if not least <= skip.total <= most:
            finding.violated(
                "skip_miscounted",
                f"{who}: {skip.total} skipped from {skip.first_at} to {skip.last_at}, reckoned {least} to {most}",
            )
        _judge_policy(finding, table, skip, who)


def _judge_policy(finding: Finding, table: Timetable, skip: Skip, who: str) -> None:
    """Who fires all that was missed may skip only what a pause kept, what is older than the window, or what would overlap (J16
    judges that)."""
    if skip.reason.startswith("misfire_") and timedelta(0) <= skip.recorded_at - skip.last_at <= _ON_TIME:
        finding.violated("skipped_on_time", f"{who}: {skip.last_at} was skipped at {skip.recorded_at}, on time")
        return
    era = table.fires.get(skip.first_at) or table.fires.get(skip.last_at)
    if era is None or era.version.misfire != _ALL or skip.reason == "paused" or skip.reason.startswith("overlap_"):
        return
    window = era.version.window_seconds
    is_old = window is not None and skip.recorded_at - skip.last_at > timedelta(seconds=window)
    if skip.reason != "outside_window" or not is_old:
        finding.violated(
            "skipped_against_policy",
            f"{who}: {skip.total} fires until {skip.last_at} skipped as {skip.reason} at {skip.recorded_at},"
            f" although the policy fires all within {window} s",
        )


def j3(case: Case, finding: Finding) -> None:
    """Runs are created and bodies start in time, unless a fault was felt meanwhile; nothing is early."""
    if not case.clock:
        return
    tables = {table.schedule_id: table for table in timetables(case)}
    created = {move.run_id: move.at_ns for move in case.evidence.run_moves if move.old_state is None}
    allowed, slack = case.ns(case.limits.fire_tolerance_seconds), case.ns(case.limits.clock_slack_seconds)
    worst = 0
    for run in case.evidence.runs:
        due_ns, made_ns = _due_ns(case, tables, run), created.get(run.run_id)
        if due_ns is None or made_ns is None:
            continue
        finding.looked_at("runs")
        late = made_ns - due_ns
        if late < -slack:
            finding.violated("early_run", f"run {run.run_id} of {run.dag} {-late / 1e9:.2f} s before {run.fire_at}")
        elif late <= allowed:
            worst = max(worst, late)
        elif made_ns <= case.planning.deadline(due_ns, allowed):
            finding.counts["late runs excused by faults"] += 1
        else:
            finding.violated("late_run", f"run {run.run_id} of {run.dag} {late / 1e9:.2f} s after {run.fire_at}")
    finding.counts["ms late at most, of those in time"] += worst // 1_000_000
    patience = case.ns(case.limits.start_tolerance_seconds)
    for bodies in _bodies(case):
        if any(era.version.overlap != "allow" for era in bodies.table.eras):
            continue  # its runs wait for each other
        finding.looked_at("starts", len(bodies.wanted))
        for instant, due in bodies.wanted.items():
            began = bodies.begun.get(instant)
            if began is not None and began > case.running.deadline(due, patience):
                finding.violated(
                    "late_start", f"{bodies.who} at {instant}: its first body began {(began - due) / 1e9:.2f} s late"
                )


def _due_ns(case: Case, tables: dict[int, Timetable], run: RunFact) -> int | None:
    """When the run became due: at its instant, or when its schedule came into force if that was later."""
    table = tables.get(run.schedule_id) if run.schedule_id is not None else None
    if run.fire_at is None or table is None or not table.is_readable:
        return None
    era = table.fires.get(run.fire_at) or table.either.get(run.fire_at)
    reached = case.clock.reached_ns(run.fire_at)
    return reached if era is None else max(reached, era.from_ns)


class Bodies(NamedTuple):
    """The expected fires of one schedule and when they were due, and when the first body of each fire began."""

    who: str
    table: Timetable
    wanted: dict[datetime, int]
    begun: dict[datetime, int]


def _compare_bodies(case: Case, finding: Finding, bodies: Bodies) -> None:
    """By name, and once more by time alone: what no id says cannot be hidden by one."""
    finding.looked_at("fires served by bodies", len(bodies.wanted))
    for instant in bodies.wanted:
        if instant not in bodies.begun:
            finding.violated("missed_in_effects", f"{bodies.who} at {instant}: no body ever began")
    strange = [instant for instant in bodies.begun if not bodies.table.knows(instant)]
    for instant in strange:
        finding.violated("extra_in_effects", f"{bodies.who} at {instant}: a body that no expected fire accounts for")
    slack, patience = case.ns(case.limits.clock_slack_seconds), case.ns(case.limits.run_seconds)
    unserved, extra = match(
        bodies.wanted.values(),
        (began + slack for began in bodies.begun.values()),
        lambda due: case.running.deadline(due, patience) + slack,
    )
    if unserved:
        finding.violated("unserved", f"{bodies.who}: by time alone, {len(unserved)} fires were served by no body")
    optional = sum(1 for instant in bodies.begun if instant not in bodies.wanted and bodies.table.knows(instant))
    if len(extra) > optional + len(strange) + len(unserved):
        finding.violated("extra_in_effects", f"{bodies.who}: by time alone, {len(extra)} bodies served no fire")


def _bodies(case: Case) -> Iterator[Bodies]:
    """Schedules that fire all they missed: there every fire has a body, unless its run says itself that it failed before
    one began, or that somebody canceled it."""
    if not case.clock or not case.evidence.effects:
        return
    names, skips = _Names(case), _skips(case)
    begun: dict[tuple[str, str], dict[datetime, int]] = defaultdict(dict)
    for effect in case.evidence.effects:
        name = names.of(effect)
        if effect.what == "begin" and effect.fire_at is not None and name is not None:
            begun[effect.dag, name].setdefault(effect.fire_at, effect.at_ns)
    spared = {(run.schedule_id, run.fire_at) for run in case.evidence.runs if run.state in ("canceled", "failed")}
    for table in timetables(case):
        if not table.is_readable or table.policy != _ALL:
            continue
        skipped, known = skips.get(table.schedule_id, Skips([])), begun.get((table.dag, table.name), {})
        yield Bodies(
            who=f"{table.dag} ({table.name})",
            table=table,
            wanted={
                instant: max(case.clock.reached_ns(instant), era.from_ns)
                for instant, era in table.fires.items()
                if not skipped.cover(instant) and (instant in known or (table.schedule_id, instant) not in spared)
            },
            begun=known,
        )


class _Names:
    """The schedule that a body belongs to: by its parameter, or because its DAG has only one."""

    def __init__(self, case: Case) -> None:
        self._of_dag: dict[str, set[str]] = defaultdict(set)
        for version in case.evidence.schedule_versions:
            self._of_dag[version.dag].add(version.name)

    def of(self, effect: Effect) -> str | None:
        known = self._of_dag.get(effect.dag, set())
        return effect.schedule or (next(iter(known)) if len(known) == 1 else None)
