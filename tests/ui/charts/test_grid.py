"""The grid of a DAG and the fields of its form, without a browser or a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from evertick.db.queries.dags import GridCell, GridRun, NewestRun
from evertick.db.queries.overview import FailingDag
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskSpec
from evertick.ui.charts.grid import lines_of, short_count, shown_state
from evertick.ui.layout import schedule_words
from evertick.ui.pages.dag import read_fields
from evertick.ui.pages.dag_schedules import when_text
from evertick.ui.pages.dags import bars_of

T0 = datetime(2030, 1, 1, tzinfo=UTC)


def run(run_id: int, *, is_open: bool = False) -> GridRun:
    ended = None if is_open else T0
    return GridRun(run_id, 1, "manual", None, T0, "running" if is_open else "success", T0, ended, 3)


def cell(run_id: int, task: str, state: str, count: int = 1) -> GridCell:
    return GridCell(run_id, task, state, count, count > 1, T0, None, 1)


def test_groups_stand_above_their_tasks_and_tell_the_worst_of_them() -> None:
    tasks = [
        TaskSpec(name="a"),
        TaskSpec(name="g.x", group="g"),
        TaskSpec(name="b"),
        TaskSpec(name="g.h.y", group="g.h"),
    ]
    cells = [cell(1, "a", "success"), cell(1, "g.x", "success"), cell(1, "g.h.y", "failed")]
    lines = lines_of(tasks, [run(1)], cells)
    assert [(line.key, line.label, line.depth, line.inside) for line in lines] == [
        ("a", "a", 0, ""),
        ("g", "g", 0, ""),
        ("g.x", "x", 1, "g"),
        ("g.h", "h", 1, "g"),
        ("g.h.y", "y", 2, "g g.h"),
        ("b", "b", 0, ""),
    ]
    states = {line.key: line.cells[0].state if line.cells[0] else None for line in lines}
    assert states == {"a": "success", "g": "failed", "g.x": "success", "g.h": "failed", "g.h.y": "failed", "b": None}


def test_a_group_tells_how_often_it_has_begun_again() -> None:
    cells = [cell(1, "g.x", "success"), cell(2, "g.x", "success"), cell(3, "g.x", "failed")]
    retried = {(2, "g"): 1, (3, "g"): 2}
    group, task = lines_of([TaskSpec(name="g.x", group="g")], [run(1), run(2), run(3)], cells, retried)
    assert [(each.retried, each.text.partition(": ")[2]) for each in group.cells if each] == [
        (0, "1 success"),
        (1, "1 success; retried once"),
        (2, "1 failed; retried 2 times"),
    ]
    assert [each.retried for each in task.cells if each] == [0, 0, 0]


def test_instances_of_a_mapped_task_are_one_cell() -> None:
    cells = [cell(7, "m", "success", 9), cell(7, "m", "failed", 2), cell(7, "m", "running", 1)]
    (line,) = lines_of([TaskSpec(name="m")], [run(7, is_open=True)], cells)
    (shown,) = line.cells
    assert shown is not None
    assert (shown.state, shown.count, shown.path) == ("failed", 12, "/runs/7/tasks/m")
    assert shown.text == "m, run 7: 2 failed, 1 running, 9 success"


def test_what_has_no_row_waits_in_an_open_run_and_is_nothing_in_one_that_ended() -> None:
    lines = lines_of([TaskSpec(name="new")], [run(1), run(2, is_open=True)], [cell(1, "old", "success")])
    assert [line.key for line in lines] == ["new", "old"]
    assert [each.state if each else None for each in lines[0].cells] == [None, "waiting"]
    assert [each.state if each else None for each in lines[1].cells] == ["success", None]
    assert shown_state({}) == "waiting"


def test_bars_are_as_high_as_their_runs_were_long() -> None:
    def took(seconds: float | None) -> NewestRun:
        ended = None if seconds is None else T0 + timedelta(seconds=seconds)
        return NewestRun(1, 1, "success", T0, None, T0, ended)

    assert [bar.height for bar in bars_of([took(10), took(5), took(0), took(None)])] == [22, 11, 4, 22]
    assert [bar.height for bar in bars_of([took(0)])] == [22]
    assert bars_of([]) == []


@pytest.mark.parametrize(
    ("newest", "in_a_row"),
    [(["failed"], 1), (["running", "failed", "failed", "success"], 2), (["success", "failed"], 0), ([], 0)],
)
def test_failures_in_a_row_end_at_the_first_other_end(newest: list[str], in_a_row: int) -> None:
    assert FailingDag("d", 1, 1, T0, None, newest).in_a_row == in_a_row


def test_fields_are_checked_one_by_one_and_what_is_empty_is_the_default() -> None:
    declared = declare_params(
        {
            "count": Param(3, minimum=1),
            "flag": Param(True),
            "kind": Param("a", choices=["a", 1, None]),
            "free": Param({"x": 1}),
            "text": Param("hello"),
            "must": Param(type=str, required=True),
            "maybe": Param(None, type=int),
        }
    )
    fields, params = read_fields(declared, {"p.must": "7", "p.kind": "1", "p.free": '{"y": 2}', "p.count": " 4 "})
    assert [field.error for field in fields] == [None] * 7
    assert params == {"count": 4, "flag": False, "kind": 1, "free": {"y": 2}, "text": "", "must": "7"}
    fields, _ = read_fields(declared, {"p.kind": "{", "p.free": "{", "p.count": "0", "p.maybe": "x", "p.flag": "true"})
    wrong = {field.spec.name for field in fields if field.error}
    assert wrong == {"kind", "free", "count", "must", "maybe"}


def test_a_schedule_is_told_in_words_and_as_one_would_type_it() -> None:
    cron: dict[str, object] = {"kind": "cron", "expression": "30 6 * * 1-5", "timezone": "UTC"}
    assert schedule_words(cron).startswith("at 06:30 on Monday to Friday")
    assert when_text(cron) == "30 6 * * 1-5"
    assert when_text({"kind": "interval", "every_seconds": 90.0}) == "@every 90s"
    assert when_text({"kind": "interval", "every_seconds": 31536000.25}) == "@every 31536000.25s"
    assert schedule_words({"kind": "cron", "expression": "nonsense"}) == "cannot be read"


def test_a_cell_shows_the_number_of_its_instances_within_its_width() -> None:
    assert [short_count(count) for count in (2, 99, 200, 999)] == ["2", "99", "200", "999"]
    assert all(len(short_count(count)) <= 4 for count in (1000, 9999, 10_000))
