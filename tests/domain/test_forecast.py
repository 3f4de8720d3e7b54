"""The simulation of a forecast: slots, queues, gates, limits, mapped and skipped tasks, running ones, and what-ifs."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest

from evertick.domain.forecast.load import load_of
from evertick.domain.forecast.model import (
    RunModel,
    RunnerModel,
    Snapshot,
    TaskModel,
    TaskProgress,
    VersionModel,
    with_pools,
    with_slots,
)
from evertick.domain.forecast.simulate import band_of, forecast, spread

TEN = (10.0,) * 20


def task(name: str, **options: object) -> TaskModel:
    return TaskModel(name=name, **{"durations": TEN, **options})  # type: ignore[arg-type]


def version(*tasks: TaskModel, edges: tuple[tuple[int, int], ...] = (), dag: str = "d") -> VersionModel:
    return VersionModel(dag=dag, tasks=tasks, edges=edges)


def snapshot(*runs: RunModel, slots: int = 1, **options: object) -> Snapshot:
    return Snapshot(runs=runs, runners=(RunnerModel(queues=("default",), slots=slots),), **options)  # type: ignore[arg-type]


def ends(found: Snapshot) -> list[float | None]:
    return [None if each.end is None else round(each.end.middle, 6) for each in forecast(found, Random).runs]


def coming(of: VersionModel, begins: float = 0.0, **options: object) -> RunModel:
    return RunModel(version=of, begins=begins, **options)  # type: ignore[arg-type]


DIAMOND = version(*map(task, "abcd"), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
ALONE = version(task("a"))


def test_tasks_share_slots_in_the_order_in_which_they_become_ready() -> None:
    assert ends(snapshot(coming(DIAMOND), slots=1)) == [40]
    assert ends(snapshot(coming(DIAMOND), slots=2)) == [30]
    assert ends(snapshot(coming(ALONE), coming(ALONE, 1), coming(ALONE, 2), slots=2)) == [10, 11, 20]


def test_the_priority_decides_who_takes_a_free_slot() -> None:
    urgent = version(task("u", rank=0))
    normal = version(task("n", rank=5))
    assert ends(snapshot(coming(ALONE), coming(normal, 1), coming(urgent, 2))) == [10, 30, 20]


def test_a_gate_admits_as_many_as_it_has_slots() -> None:
    pooled = version(task("p", gates=(("pool p", 1),)))
    held = snapshot(*[coming(pooled, n) for n in range(3)], slots=10, gates={"pool p": 1})
    assert ends(held) == [10, 20, 30]
    assert ends(with_pools(held, {"p": 3})) == [10, 11, 12]


def test_a_dag_runs_as_many_runs_as_its_limit() -> None:
    assert ends(snapshot(*[coming(ALONE, n) for n in range(3)], slots=10, active_limits={"d": 1})) == [10, 20, 30]


def test_what_cannot_move_has_no_end() -> None:
    elsewhere = version(task("e", queue="gpu"))
    lost = snapshot(coming(elsewhere), coming(ALONE, is_paused=True), coming(ALONE), slots=1)
    assert ends(lost) == [None, None, 10]
    assert ends(with_slots(lost, {"gpu": 1})) == [10, None, 10]


def test_a_wait_takes_no_slot_and_an_ended_task_no_time() -> None:
    waits = version(task("w", needs_slot=False), task("a"), edges=((0, 1),))
    begun = replace(coming(waits), is_started=True, progress={0: TaskProgress(ended=1), 1: TaskProgress(waiting=1)})
    asleep = replace(coming(waits), is_started=True, progress={0: TaskProgress(waiting=1, wakes_in=5)})
    assert ends(snapshot(begun)) == [10]
    assert ends(snapshot(coming(waits), coming(ALONE))) == [20, 10]
    assert ends(snapshot(asleep)) == [25]


def test_a_running_task_holds_its_slot_for_the_rest_of_its_duration() -> None:
    begun = replace(coming(ALONE), is_started=True, run_id=1, progress={0: TaskProgress(elapsed=(4.0,))})
    assert ends(snapshot(begun, coming(ALONE))) == [6, 16]


def test_mapped_tasks_count_with_their_usual_number_of_instances_and_skipped_ones_take_no_time() -> None:
    assert ends(snapshot(coming(version(task("m", instances=4.0))), slots=2)) == [20]
    assert ends(snapshot(coming(version(task("s", skip_share=1.0), task("a"), edges=((0, 1),))))) == [10]


def test_the_share_of_repetitions_that_miss_a_deadline() -> None:
    even = version(task("a", durations=tuple(float(n) for n in range(1, 101))))
    never, sometimes, always = forecast(
        snapshot(*[coming(even, deadline=deadline) for deadline in (200.0, 50.0, 0.1)], slots=9), Random
    ).runs
    assert never.lateness == 0 and always.lateness == 1 and 0.2 < sometimes.lateness < 0.8
    assert sometimes.end is not None and 3 < sometimes.end.low < 30 < 70 < sometimes.end.high < 98


def test_the_expected_times_of_waiting_tasks() -> None:
    found = forecast(snapshot(coming(DIAMOND), slots=1), Random)
    assert {idx: tuple(round(each) for each in times) for (_, idx), times in found.tasks.items()} == {
        0: (0, 10),
        1: (10, 20),
        2: (20, 30),
        3: (30, 40),
    }


@pytest.mark.parametrize("durations", [(), (5.0,), (5.0, 6.0), (0.0, 1.0, 2.0)])
def test_a_spread_is_sorted_and_goes_beyond_what_was_seen(durations: tuple[float, ...]) -> None:
    found = spread(durations)
    assert found == sorted(found) and found[0] >= 0 and len(found) > len(durations)
    assert not durations or (found[0] <= min(durations) and found[-1] > max(durations))


def test_a_band_of_few_repetitions_is_wider_than_they_are() -> None:
    few = band_of([10.0, 11.0, 12.0, 13.0])
    assert few.low < 10 < few.middle < 13 < few.high


def test_load_that_exceeds_the_slots_is_left_for_the_next_hour() -> None:
    hour = version(task("a", durations=(3600.0,) * 5))
    load = load_of(snapshot(*[coming(hour) for _ in range(3)], coming(hour, 4000), slots=2), 3)["default"]
    assert [(each.needed, each.used, each.backlog) for each in load] == [(3, 2, 1), (1, 2, 0), (0, 0, 0)]


def test_a_forecast_of_ten_thousand_waiting_tasks_takes_less_than_half_a_second() -> None:
    durations = tuple(float(n) for n in range(1, 51))
    many = [
        version(*[task(f"t{n}", durations=durations) for n in range(10)], edges=tuple((n, n + 1) for n in range(9)))
        for _ in range(50)
    ]
    waiting = snapshot(*[coming(many[n % 50], is_started=True, run_id=n + 1) for n in range(1000)], slots=64)
    began = time.process_time()
    found = forecast(waiting, Random)
    assert time.process_time() - began < 0.5
    assert len(found.tasks) == 10_000
