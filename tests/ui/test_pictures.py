"""What charts say is what is on record: waits by their cause, days by their worst, durations beside each other."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from evertick.db.queries.overview import OpenTask, RunAttempt, RunLength, RunsOfHour, StateOfTask
from evertick.db.queries.tasks import TaskRow
from evertick.ui.charts.calendar import durations_of, year_of
from evertick.ui.charts.gantt import MOST_LINES, Gantt, draw
from evertick.ui.charts.graph import node_states

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else T0 + timedelta(seconds=seconds)


def row(idx: int, state: str, began: float | None, ended: float | None, **more: object) -> TaskRow:
    values: dict[str, object] = {
        "task_index": idx,
        "map_index": -1,
        "task": f"t{idx}",
        "state": state,
        "attempt": 1,
        "max_attempts": 3,
        "epoch": 1,
        "queue": "default",
        "priority": 5,
        "not_before": None,
        "started_at": at(began),
        "finished_at": at(ended),
        "exit_code": None,
        "reason": None,
        "request": None,
    }
    return TaskRow(**{**values, **more})  # type: ignore[arg-type]


def attempt(
    idx: int, number: int, outcome: str, began: float | None, ended: float | None, **stamps: float
) -> RunAttempt:
    """Stamps in seconds: let_in, taken, retry, polled; `start` is how long its body took to begin."""
    return RunAttempt(
        idx=idx,
        map_index=-1,
        task=f"t{idx}",
        epoch=number,
        attempt=number,
        outcome=outcome,
        reason=None,
        let_in_at=at(stamps.get("let_in")),
        taken_at=at(stamps.get("taken")),
        started_at=at(began),
        start_seconds=stamps.get("start"),
        finished_at=at(ended),
        retry_at=at(stamps.get("retry")),
        polled_since=at(stamps.get("polled")),
    )


def bars(chart: Gantt, idx: int) -> list[tuple[str, float, float]]:
    line = next(line for line in chart.lines if line.idx == idx)
    return [(bar.kind, (bar.begin - T0).total_seconds(), bar.seconds) for bar in line.bars]


def test_waiting_is_split_by_what_was_waited_for() -> None:
    rows = [
        row(0, "success", 2, 10),
        row(1, "failed", 40, 45),
        row(2, "success", 25, 30),
        row(3, "available", None, None),
        row(4, "waiting", None, None),
    ]
    attempts = [
        attempt(0, 1, "success", 2, 10),
        attempt(1, 1, "failed", 11, 20, retry=35),
        attempt(1, 2, "failed", 40, 45),
        attempt(2, 1, "success", 25, 30, let_in=22),
    ]
    edges = [(0, 1), (0, 2), (2, 3), (1, 4)]
    chart = draw(rows, attempts, edges, begin=T0, now=T0 + timedelta(seconds=50))
    assert bars(chart, 0) == [("queue", 0, 2), ("run", 2, 8)]
    assert bars(chart, 1) == [("queue", 10, 1), ("run", 11, 9), ("retry", 20, 15), ("queue", 35, 5), ("run", 40, 5)]
    assert bars(chart, 2) == [("gate", 10, 12), ("queue", 22, 3), ("run", 25, 5)]
    assert bars(chart, 3) == [("queue", 30, 20)]
    assert [line.idx for line in chart.lines] == [0, 1, 2, 3], "what has not begun has no bar"
    assert chart.seconds == 50 and chart.ticks[0].x == 0 and len(chart.ticks) <= 9
    assert all(bar.x >= 0 and bar.x + bar.width <= 100.001 for line in chart.lines for bar in line.bars)
    assert list(chart.waits) == ["retry", "gate", "queue"]


def line_of(state: str, attempts: list[RunAttempt], **stamps: float) -> list[tuple[str, float, float]]:
    """The bars of a task that was free to begin at 0, looked at after 100 seconds."""
    last = attempts[-1] if attempts else None
    task = row(0, state, None, None)
    if last is not None:
        task = replace(task, started_at=last.started_at, finished_at=last.finished_at)
    waits = [OpenTask(0, -1, at(stamps.get("let_in")), at(stamps.get("taken")))] if stamps else []
    chart = draw([task], attempts, [], open_tasks=waits, begin=T0, now=T0 + timedelta(seconds=100))
    return bars(chart, 0)


def test_the_start_of_a_body_is_neither_its_queue_nor_its_run() -> None:
    cold = attempt(0, 1, "success", 5, 20, start=3)
    assert line_of("success", [cold]) == [("queue", 0, 5), ("start", 5, 3), ("run", 8, 12)]
    elsewhere = attempt(0, 1, "success", 20, 30, let_in=4, taken=6, start=2)
    assert line_of("success", [elsewhere]) == [("gate", 0, 4), ("queue", 4, 2), ("start", 6, 16), ("run", 22, 8)]
    never_begun = attempt(0, 1, "failed", None, 30, taken=6)
    assert line_of("failed", [never_begun]) == [("queue", 0, 6), ("start", 6, 24)]
    said_too_much = attempt(0, 1, "failed", 5, 20, start=99)
    assert line_of("failed", [said_too_much]) == [("queue", 0, 5), ("start", 5, 15), ("run", 20, 0)]


def test_stamps_of_an_earlier_attempt_say_nothing_of_this_one() -> None:
    first = attempt(0, 1, "lost", 10, 20, taken=5, let_in=3, retry=20)
    # taken by a runner that runs it itself: the row still has when the other one took it
    second = attempt(0, 2, "success", 40, 50, taken=5, let_in=30)
    assert line_of("success", [first, second])[-3:] == [("gate", 20, 10), ("queue", 30, 10), ("run", 40, 10)]
    # cleared by somebody, some time between 20 and 40
    done = attempt(0, 1, "success", 10, 20)
    assert line_of("success", [done, attempt(0, 2, "success", 40, 50)])[-2:] == [("retry", 20, 20), ("run", 40, 10)]


def test_a_sensor_waits_for_something_outside() -> None:
    last_poll = attempt(0, 7, "success", 60, 61, polled=2)
    assert line_of("success", [last_poll]) == [("queue", 0, 2), ("outside", 2, 58), ("run", 60, 1)]


def test_what_has_not_begun_shows_how_far_it_is() -> None:
    assert line_of("pending", []) == [("gate", 0, 100)]
    assert line_of("available", [], let_in=30) == [("gate", 0, 30), ("queue", 30, 70)]
    assert line_of("queued", [], let_in=30, taken=40) == [("gate", 0, 30), ("queue", 30, 10), ("start", 40, 60)]
    failed = attempt(0, 1, "failed", 1, 2, retry=12)
    assert line_of("pending", [failed])[-2:] == [("retry", 2, 10), ("gate", 12, 88)]


def test_a_chart_has_an_end_however_many_tasks_there_are() -> None:
    count = MOST_LINES + 10
    rows = [row(n, "success", 1, 2) for n in range(count)]
    chart = draw(rows, [attempt(n, 1, "success", 1, 2) for n in range(count)], [], begin=T0, now=T0)
    assert (len(chart.lines), chart.left_out) == (MOST_LINES, 10)
    empty = draw([], [], [], begin=T0, now=T0)
    assert not empty.lines and empty.seconds > 0


def test_a_day_shows_its_worst_and_how_many() -> None:
    counts = [
        RunsOfHour(T0, "success", 8),
        RunsOfHour(T0 + timedelta(hours=1), "failed", 1),
        RunsOfHour(T0 - timedelta(days=3), "success", 1),
        RunsOfHour(T0 - timedelta(days=2), "canceled", 2),
    ]
    year = year_of(counts, today=date(2030, 1, 1))
    by_day = {day.day: day for day in year.days}
    assert (by_day[date(2030, 1, 1)].state, by_day[date(2030, 1, 1)].total, by_day[date(2030, 1, 1)].level) == (
        "failed",
        9,
        4,
    )
    assert (by_day[date(2029, 12, 29)].state, by_day[date(2029, 12, 29)].level) == ("success", 1)
    assert by_day[date(2029, 12, 30)].state == "canceled"
    assert by_day[date(2029, 12, 31)].state is None and by_day[date(2029, 12, 31)].level == 0
    assert (year.total, year.failed) == (12, 1)
    assert len(year.days) > 364 and year.days[0].weekday == 0 and year.days[-1].day == date(2030, 1, 1)
    noon = next(hour for hour in year.hours if (hour.weekday, hour.hour) == (1, 13))
    assert (noon.total, noon.failed) == (1, 1)


def test_durations_stand_beside_the_longest() -> None:
    runs = [
        RunLength(3, "running", T0, T0, at(90), None, None),
        RunLength(2, "failed", T0, T0, at(10), at(60), None),
        RunLength(1, "queued", T0, T0, None, None, None),
    ]
    chart = durations_of(runs, now=T0 + timedelta(seconds=100))
    assert [column.run.run_id for column in chart.columns] == [1, 2, 3]
    assert [(column.waited_seconds, column.ran_seconds) for column in chart.columns] == [(100, 0), (10, 50), (90, 10)]
    assert (chart.tallest_seconds, chart.median_seconds) == (100, 50)
    assert [column.waited + column.ran for column in chart.columns] == [100, 60, 100]
    assert durations_of([], now=T0).columns == []


def test_a_mapped_task_shows_its_worst_and_how_many_of_them() -> None:
    found = [
        StateOfTask(0, "success", 1, False),
        StateOfTask(1, "success", 7, True),
        StateOfTask(1, "failed", 2, True),
        StateOfTask(1, "running", 1, True),
    ]
    states = node_states(["a", "m", "later"], found, is_run=True)
    assert (states[0].state, states[0].count) == ("success", "")
    assert (states[1].state, states[1].count) == ("failed", "2/10")
    assert states[1].title == "m: 7 success, 2 failed, 1 running"
    assert states[2].state == "waiting"
    assert node_states(["a"], [], is_run=False)[0].state == "none"
