"""The logs come back as they were written, and what a fault excuses follows from its kind and target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.reading import read_client, read_nemesis
from tests.chaos.record import Answer, ClientLog, Fault, NemesisLog, Phase, boot_ns, disturbed_by
from tests.chaos.windows import Windows


def test_faults_have_a_begin_and_an_end(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    before = boot_ns()
    freeze = log.began(Fault.FREEZE, "runner-1", seconds=12)
    kill = log.instant(Fault.KILL, "scheduler-2", disturbs=())
    log.ended(freeze)
    log.ended(freeze, recovered_seconds=1.5)
    open_ended = log.began(Fault.CUT, "scheduler-1")
    log.phase(Phase.READ)
    first, second, third = read_nemesis(tmp_path / "log").faults
    assert (first.number, first.kind, first.target) == (freeze, Fault.FREEZE, "runner-1")
    assert before <= first.start_ns <= second.start_ns <= first.stop_ns <= boot_ns()
    assert first.parameters == {"seconds": 12, "recovered_seconds": 1.5}
    assert first.recovered_seconds == 1.5
    assert first.silences == "runner-1"
    assert (second.number, second.disturbs, second.silences) == (kill, (), None)
    assert third.number == open_ended and third.stop_ns >= third.start_ns


def test_a_fault_that_is_over_does_not_last_longer_for_being_told_more(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    kill = log.instant(Fault.KILL, "runner-1")
    log.phase(Phase.LOAD)
    log.ended(kill, recovered_seconds=2.0)
    (fault,) = read_nemesis(tmp_path / "log").faults
    (phase,) = read_nemesis(tmp_path / "log").phases
    assert fault.stop_ns < phase[1] and fault.recovered_seconds == 2.0


def test_processes_live_and_end_and_are_looked_at(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    log.started("runner-1", os.getpid())
    log.started("runner-2", 999_999)
    log.exited("runner-2", 999_999, -9)
    log.phase(Phase.LOAD)
    assert log.sample("runner-1", os.getpid(), connections=3)
    assert not log.sample("runner-2", 999_999)
    log.sample_total(connections=5, strays=0)
    found = read_nemesis(tmp_path / "log")
    assert [(life.service, life.exit_ns is None, life.status) for life in found.lives] == [
        ("runner-1", True, None),
        ("runner-2", False, -9),
    ]
    (sample,) = found.samples
    assert sample.fds > 2 and sample.threads >= 1 and sample.rss_kb > 1000
    assert (sample.connections, sample.phase) == (3, "load")
    assert found.totals[0].connections == 5
    assert found.phase_ns(Phase.LOAD) is not None and found.phase_ns(Phase.READ) is None


def test_what_executors_have_is_there_from_its_making_to_its_end(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    log.placed("et-1")
    log.placed("et-2")
    log.displaced("et-1")
    log.placed("et-1")
    first, second, again = read_nemesis(tmp_path / "log").placements
    assert [each.name for each in (first, second, again)] == ["et-1", "et-2", "et-1"]
    assert first.stop_ns is not None and second.stop_ns is None and again.stop_ns is None
    assert first.is_there(first.start_ns, 0) and not first.is_there(first.stop_ns + 1, 0)
    assert not first.is_there(first.start_ns, 10), "it was just being made"
    assert second.is_there(boot_ns(), 0)


def test_a_frozen_agent_is_silent_and_no_other(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    for target in ("et-7-0-x-1-000000000000000a", "agents", "api-1"):
        log.instant(Fault.FREEZE, target)
    silent = [fault.silences for fault in read_nemesis(tmp_path / "log").faults]
    assert silent == ["et-7-0-x-1-000000000000000a", None, None]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    log.phase(Phase.IDLE)
    with (tmp_path / "log").open("ab") as half:
        half.write(b'{"what": "phase", "na')
    assert len(read_nemesis(tmp_path / "log").phases) == 1


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        ([], Answer.UNKNOWN),
        ([Answer.OK], Answer.OK),
        ([Answer.ERROR], Answer.ERROR),
        ([Answer.UNKNOWN, Answer.OK], Answer.OK),
        ([Answer.UNKNOWN, Answer.ERROR], Answer.UNKNOWN),
    ],
)
def test_a_request_is_known_once_any_answer_said_so(tmp_path: Path, answers: list[Answer], known: Answer) -> None:
    log = ClientLog(tmp_path / "log")
    log.asked("trigger", request="r-1", dag="d")
    for number, answer in enumerate(answers):
        log.answered("r-1", answer, tries=number)
    (request,) = read_client(tmp_path / "log")
    assert (request.op, request.request, request.answer) == ("trigger", "r-1", known)
    assert request.detail["dag"] == "d"


@pytest.mark.parametrize(
    ("kind", "target", "excused"),
    [
        (Fault.KILL, "scheduler-1", ("planning", "running")),
        (Fault.KILL, "runner-1", ("running",)),
        (Fault.KILL, "et-7-0-x-1-000000000000000a", ("running",)),
        (Fault.OUTAGE, "kubernetes", ("running",)),
        (Fault.OUTAGE, "api-1", ("running",)),
        (Fault.OUTAGE, "postgres", ("planning", "running")),
        (Fault.DELAY, "all", ("planning", "running")),
        (Fault.CLOCK, "scheduler-1", ()),
        (Fault.POISON, "all", ()),
        (Fault.RETRY_STORM, "all", ()),
        (Fault.DISK_FULL, "runner-1", ()),
    ],
)
def test_what_a_fault_excuses(kind: Fault, target: str, excused: tuple[str, ...]) -> None:
    assert disturbed_by(kind, target) == excused


def test_an_outage_of_the_database_silences_nobody(tmp_path: Path) -> None:
    log = NemesisLog(tmp_path / "log")
    for kind, target in ((Fault.OUTAGE, "postgres"), (Fault.CUT, "scheduler-1"), (Fault.DELAY, "runner-1")):
        log.instant(kind, target)
    assert [fault.silences for fault in read_nemesis(tmp_path / "log").faults] == [None, None, None]


def test_windows_that_touch_are_one() -> None:
    assert list(Windows([(5, 7), (1, 2), (2, 4), (6, 9)])) == [(1, 4), (5, 9)]


@pytest.mark.parametrize(
    ("start", "allowed", "end"),
    [(0, 5, 5), (0, 10, 30), (15, 1, 21), (20, 1, 21), (21, 1, 22), (5, 10, 30), (35, 4, 39), (35, 5, 55), (0, 20, 70)],
)
def test_a_deadline_goes_on_after_each_window_that_it_meets(start: int, allowed: int, end: int) -> None:
    assert Windows([(10, 20), (40, 50)]).deadline(start, allowed) == end


def test_what_lies_in_windows_is_measured() -> None:
    windows = Windows([(10, 20), (40, 50)])
    assert [windows.covered(0, 60), windows.covered(15, 45), windows.covered(20, 40), windows.covered(12, 13)] == [
        20,
        10,
        0,
        1,
    ]
    assert [windows.meets(0, 9), windows.meets(0, 10), windows.meets(20, 21), windows.meets(21, 39)] == [
        False,
        True,
        True,
        False,
    ]
