"""The checker finds nothing in a good run, and each planted violation, of each kind, by the invariant that it breaks.

A checker that never failed proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertick.domain.states import RUN_TRANSITIONS, TASK_TRANSITIONS
from tests.chaos.checker import check
from tests.chaos.checks.matching import match
from tests.chaos.checks.moves import RUN_MOVES, TASK_MOVES
from tests.chaos.evidence import ClockMap, ClockReading, Evidence
from tests.chaos.plants import (
    CALM,
    PLANTED,
    QUIET_RUN,
    TIGHT,
    Planted,
    changed,
    closed_shard,
    faults,
    j7_reaped_after_beat,
    j10_lost,
    nemesis,
    pulse_at,
    removed,
    with_line,
)
from tests.chaos.record import Fault, FaultWindow
from tests.chaos.story import Story, ns, tell, wall
from tests.chaos.verdict import INVARIANTS, Limits
from tests.chaos.windows import Windows


@cache
def good() -> Evidence:
    return tell()


def test_a_good_run_is_green_and_exercises_everything() -> None:
    report = check(good())
    assert report.violations == [], report.text()
    assert report.is_good()
    assert list(report.findings) == list(INVARIANTS)
    assert check(good(), TIGHT).is_good(), "the limits that the plants are held to"


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_violation_is_found_by_its_invariant_alone(planted: Planted) -> None:
    report = check(planted.plant(good()), planted.limits)
    assert planted.kind in {each.kind for each in report.findings[planted.invariant].violations}, report.text()
    assert {name for name, _ in report.violations} == {planted.invariant} | planted.also, report.text()
    assert not report.is_good(required=())
    assert planted.kind in report.text()


def test_every_kind_of_violation_is_planted_and_written_down() -> None:
    folder = Path(__file__).parent
    written = {
        (found[1], kind)
        for found in re.finditer(r"^\| (J\d+) \|[^|]*\|([^|]*)\|$", (folder / "README.md").read_text(), re.MULTILINE)
        for kind in re.findall(r"`(\w+)`", found[2])
    }
    assert {(planted.invariant, planted.kind) for planted in PLANTED} == written
    code = "\n".join(path.read_text() for path in (folder / "checks").glob("*.py"))
    named = set(re.findall(r"violated\(\s*\"(\w+)\"", code)) | set(re.findall(r"judge\(\s*\"(\w+)\"", code))
    assert named and named <= {kind for _, kind in written}


def test_a_busy_run_is_judged_as_well() -> None:
    """70,000 events, in a second: no check compares each with each."""
    busy = tell(busy=45)
    assert sum(len(part) for part in (busy.effects, busy.task_moves, busy.run_moves, busy.lease_moves)) > 50_000
    report = check(busy)
    assert report.is_good(), report.text()


def test_what_had_nothing_to_check_is_not_called_good() -> None:
    report = check(Evidence(), only=("J1", "J9"))
    assert report.violations == []
    assert report.not_exercised() == ["J1", "J9"]
    assert not report.is_good()
    assert report.is_good(required=())
    assert "not exercised" in report.text()
    assert not check(good(), only=("J1",)).is_good(required=("J1", "J2")), "J2 was required and not asked"


def test_without_an_end_of_the_faults_nothing_is_called_drained() -> None:
    assert [violation.kind for _, violation in check(Evidence(), only=("J8",)).violations] == ["not_drained"]


def test_the_report_is_plain_json() -> None:
    found = check(j10_lost(good())).as_json()
    assert found["J10"]["violations"][0]["kind"] == "lost"
    assert found["J1"] == {"status": "ok", "checked": 82, "counts": found["J1"]["counts"], "violations": []}


def test_a_failover_that_lagged_may_lose_what_was_just_acknowledged() -> None:
    lost = j10_lost(good())
    failover = FaultWindow(
        number=1,
        kind=Fault.FAILOVER,
        target="postgres",
        start_ns=ns(39),
        stop_ns=ns(40),
        disturbs=(),
        parameters={"may_lose_seconds": 5},
    )
    excused = nemesis(lost, faults=(*lost.nemesis.faults, failover))
    assert check(excused, only=("J10",)).is_good()


def test_a_late_run_is_excused_by_a_fault_that_was_felt_and_by_no_other() -> None:
    run_id = pulse_at(good(), CALM)
    moves = tuple(
        move._replace(at_ns=ns(CALM + 6)) if move.run_id == run_id and move.old_state is None else move
        for move in good().run_moves
    )
    late = replace(good(), run_moves=moves)
    for disturbs, is_good in ((("planning",), True), (("running",), False), ((), False)):
        fault = replace(late.nemesis.faults[0], start_ns=ns(CALM), stop_ns=ns(CALM + 1), disturbs=disturbs)
        assert check(nemesis(late, faults=(*late.nemesis.faults, fault)), only=("J3",)).is_good() is is_good


def test_a_closed_shard_needs_no_leader() -> None:
    for opened in (115, 500):
        report = check(closed_shard(good(), opened=opened, led_again=opened + 1), only=("J13",))
        assert report.is_good(), report.text()


def test_silence_is_judged_by_the_whole_threshold() -> None:
    """The frozen runner was given up 9.5 s into its freeze: right for 9 s, wrong for 12."""
    assert check(good(), Limits(lost_after_seconds=9.0), only=("J7",)).is_good()
    assert not check(good(), Limits(lost_after_seconds=12.0), only=("J7",)).is_good()


def test_an_attempt_stopped_by_its_runner_may_end_before_the_report() -> None:
    """But only if nobody could have heard it before, for the whole threshold."""
    heard = j7_reaped_after_beat(good())
    assert not check(heard, TIGHT, only=("J7",)).is_good()
    told = replace(
        heard,
        task_moves=tuple(
            move._replace(reason="lost_contact: stopped")
            if move.run_id == 90_002 and move.old_state == "running"
            else move
            for move in heard.task_moves
        ),
    )
    assert check(told, TIGHT, only=("J7",)).is_good()
    assert not check(told, replace(TIGHT, lost_after_seconds=12.0), only=("J7",)).is_good()


def test_two_short_freezes_are_not_one_long_one() -> None:
    def halve(fault: FaultWindow) -> FaultWindow:
        return replace(fault, stop_ns=ns(63)) if fault.kind is Fault.FREEZE else fault

    halved = faults(good(), halve)
    second = replace(next(f for f in good().nemesis.faults if f.kind is Fault.FREEZE), start_ns=ns(68))
    assert not check(nemesis(halved, faults=(*halved.nemesis.faults, second)), only=("J7",)).is_good()


def test_a_run_that_was_cleared_may_run_again() -> None:
    """Budgets and chains begin anew with a clear."""
    last = max(move.entry for move in good().task_moves)
    closed = next(move for move in good().run_moves if move.run_id == QUIET_RUN and move.new_state == "success")
    like = [move for move in good().task_moves if move.run_id == QUIET_RUN]
    cleared = like[-1]._replace(
        entry=last + 10**6, tx=1, at_ns=ns(50), old_state="success", new_state="waiting", old_session=None
    )
    again = like[0]._replace(entry=last + 10**6 + 2, tx=2, at_ns=ns(50.1), old_state="waiting")
    reopened = closed._replace(entry=last + 10**6 + 1, tx=1, at_ns=ns(50), old_state="success", new_state="queued")
    evidence = replace(good(), task_moves=(*good().task_moves, cleared, again), run_moves=(*good().run_moves, reopened))
    report = check(evidence, only=("J4", "J6", "J11"))
    assert report.violations == [], report.text()


# Runs whose attempts end in many ways, all within the rules: at most two failures, any number given back.
_RUNS = st.lists(
    st.tuples(
        st.floats(105, 125), st.permutations(["failed", "failed", "given_back", "given_back"]), st.integers(0, 4)
    ),
    min_size=1,
    max_size=6,
)


def told_with(runs: list[tuple[float, list[str], int]]) -> Evidence:
    def also(story: Story) -> None:
        for number, (at, outcomes, length) in enumerate(runs):
            story.try_until_success(95_000 + number, at, outcomes[:length])

    return tell(also=also)


@settings(max_examples=20)
@given(_RUNS)
def test_whatever_keeps_to_the_rules_is_green(runs: list[tuple[float, list[str], int]]) -> None:
    report = check(told_with(runs))
    assert report.violations == [], report.text()


@settings(max_examples=30)
@given(_RUNS, st.sampled_from(["drop", "double", "shift", "forge"]), st.data())
def test_one_wrong_thing_among_many_right_ones_is_red(
    runs: list[tuple[float, list[str], int]], deed: str, data: st.DataObject
) -> None:
    evidence = told_with(runs)
    run_id = data.draw(st.sampled_from([run.run_id for run in evidence.runs if run.dag in ("pulse", "flaky")]))
    match deed:
        case "drop":
            evidence = removed(evidence, "effects", lambda effect: effect.run_id == run_id)
        case "double":
            line = data.draw(st.sampled_from([x for x in evidence.effects if x.run_id == run_id and x.what == "begin"]))
            evidence = with_line(evidence, line, at_ns=line.at_ns + 1000, pid=1)
        case "shift":
            late = max((move for move in evidence.run_moves if move.run_id == run_id), key=lambda move: move.entry)
            evidence = changed(evidence, "run_moves", lambda move: move == late, at_ns=ns(10_000))
        case "forge":
            report = data.draw(st.sampled_from([x for x in evidence.reports if x.run_id == run_id]))
            evidence = changed(evidence, "reports", lambda x: x == report, session=7)
    assert not check(evidence).is_good(), f"{deed} of run {run_id} was not noticed"


def test_the_checkers_own_table_of_moves_is_the_programs() -> None:
    """Both are copies of the design's table. A change must be made in both, knowingly."""
    ours = {state: set(moves) for state, moves in TASK_MOVES.items()}
    assert ours == {str(state): {str(to) for to in moves} for state, moves in TASK_TRANSITIONS.items()}
    runs = {state: set(moves) for state, moves in RUN_MOVES.items()}
    assert runs == {str(state): {str(to) for to in moves} for state, moves in RUN_TRANSITIONS.items()}


# The matching by time --------------------------------------------------------------------------------------------------


def brute_force(targets: list[int], starts: list[int], deadline: Windows, allowed: int) -> int:
    """The size of the largest matching, by augmenting paths."""
    served: dict[int, int] = {}

    def serve(start: int, tried: set[int]) -> bool:
        for number, target in enumerate(targets):
            if number in tried or not target <= starts[start] <= deadline.deadline(target, allowed):
                continue
            tried.add(number)
            if number not in served or serve(served[number], tried):
                served[number] = start
                return True
        return False

    return sum(serve(start, set()) for start in range(len(starts)))


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 60), max_size=9),
    st.lists(st.integers(0, 80), max_size=9),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=3),
)
def test_the_matching_by_time_is_the_largest_there_is(
    targets: list[int], starts: list[int], allowed: int, gaps: list[tuple[int, int]]
) -> None:
    windows = Windows((start, start + length) for start, length in gaps)
    missed, extra = match(targets, starts, lambda target: windows.deadline(target, allowed))
    most = brute_force(sorted(targets), sorted(starts), windows, allowed)
    assert len(targets) - len(missed) == most
    assert len(starts) - len(extra) == most


@given(st.lists(st.integers(0, 1000), max_size=30, unique=True), st.integers(0, 20), st.data())
def test_one_dropped_start_is_one_miss(targets: list[int], allowed: int, data: st.DataObject) -> None:
    starts = [target + data.draw(st.integers(0, allowed)) for target in targets]
    assert match(targets, starts, lambda target: target + allowed) == ([], [])
    if starts:
        starts.remove(data.draw(st.sampled_from(starts)))
        missed, extra = match(targets, starts, lambda target: target + allowed)
        assert (len(missed), extra) == (1, [])


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=6), st.integers(-10, 120), st.integers(0, 20)
)
def test_a_later_start_never_has_an_earlier_deadline(gaps: list[tuple[int, int]], start: int, allowed: int) -> None:
    """What the matching rests on."""
    windows = Windows((begin, begin + length) for begin, length in gaps)
    assert windows.deadline(start, allowed) <= windows.deadline(start + 1, allowed)


# The clock of the database ---------------------------------------------------------------------------------------------


def test_a_clock_that_was_never_set_is_an_offset() -> None:
    clock = ClockMap(tuple(ClockReading(ns(at), wall(at)) for at in range(0, 100, 5)))
    assert clock.reached_ns(wall(42.5)) == ns(42.5)
    assert clock.wall_at(ns(42.5)) == wall(42.5)
    assert clock.reached_ns(wall(120)) == ns(120)


def test_a_time_is_reached_once_however_often_the_clock_shows_it() -> None:
    """Set forward by an hour at 50 and back at 60."""
    readings = [ClockReading(ns(at), wall(at + (3600 if 50 <= at < 60 else 0))) for at in range(100)]
    clock = ClockMap(tuple(readings))
    assert clock.reached_ns(wall(49)) == ns(49)
    assert clock.reached_ns(wall(1800)) == ns(50), "what was jumped over is reached by the jump"
    assert clock.reached_ns(wall(3655)) == ns(55)
    assert clock.reached_ns(wall(80)) == ns(50)
    assert clock.latest_at == wall(3659)
