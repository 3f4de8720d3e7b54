"""The instruments: a smoke test of every measurement, which asserts no time, and what is done with the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench import profiles, report, way
from bench.compare import Comparison
from bench.counted import Event
from bench.figures import Figure, Goal, at_least, at_most, median, read, write
from bench.profile_tables import Shown
from bench.run import IN_ONE_HOUSE, NOT_QUICK, ON_THEIR_OWN
from bench.stacks import from_samples
from bench.work import percentile

ROOT = Path(__file__).parents[1]


def bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVERTICK_")}
    command = [sys.executable, "-m", "bench.run", "--quick", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=1200)


# Each starts an installation: three kinds of installations here, and the others by `make bench-smoke`.
ALONE = "idle,dispatch,api_crowd"
HEAVY = "runners,fleet,fleet_https,history,fire_50k,idle_schedules,api_reads,api_pollers"
heavy = pytest.mark.skipif(not os.environ.get("EVERTICK_TEST_BENCH"), reason="make bench-smoke")


@pytest.mark.long
@pytest.mark.parametrize(
    "only",
    [
        pytest.param("", id="in one house"),
        pytest.param(ALONE, id="on their own"),
        pytest.param(HEAVY, id="on their own, heavy", marks=heavy),
    ],
)
def test_every_figure_can_be_measured(tmp_path: Path, only: str) -> None:
    done = bench(tmp_path / "figures.json", *(["--only", only] if only else []))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert {row["name"].split(".")[0] for row in rows} == set(only.split(",") if only else IN_ONE_HOUSE)
    for row in rows:
        assert {"name", "value", "unit", "goal", "met", "settings"} <= set(row)
        assert row["value"] is not None, row
        assert row["settings"]["fsync"] == "on"
        assert row["settings"]["synchronous_commit"] == "on"
        if row["settings"].get("isolation"):
            assert row["settings"]["rows_per_task"] == {"log": 1.0, "result": 1.0, "history": 1.0}


def test_the_smoke_test_and_its_other_half_leave_out_only_what_takes_an_hour() -> None:
    assert set(ON_THEIR_OWN) == NOT_QUICK
    assert set(ON_THEIR_OWN) - {*ALONE.split(","), *HEAVY.split(","), "agents", "retention"} == {
        "airflow",
        "soak",
        "ui",
        "retention_10m",
    }


def test_a_name_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    done = bench(tmp_path / "figures.json", "--only", "chian")
    assert done.returncode == 2
    assert "chian" in done.stderr
    assert "chain" in done.stderr
    assert not (tmp_path / "figures.json").exists()


def test_a_run_of_some_figures_keeps_the_others(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    chain = median("chain.warm", "a chain", "s", [0.2, 0.1, 0.3], at_most(0.15), {"fsync": "on"})
    write([chain, Figure(name="hop.p50", about="a hop", unit="ms", value=1.0)], kept)
    write([Figure(name="hop.p99", about="a hop", unit="ms", value=2.0)], kept)
    assert [figure.name for figure in read(kept)] == ["chain.warm", "hop.p99"]
    assert read(kept)[0].value == 0.2
    assert read(kept)[0].settings == {"fsync": "on"}


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [(at_most(1), 1.0, True), (at_most(1), 1.01, False), (at_least(500), 500.0, True), (at_least(500), None, False)],
)
def test_a_goal_is_met_on_its_own_side_and_never_by_what_was_not_measured(goal, value, met) -> None:  # type: ignore[no-untyped-def]
    assert Figure(name="x", about="x", unit="s", value=value, goal=goal).met is met


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7


def test_samples_of_one_function_count_together_whatever_the_line(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_text(
        "main (a/cli.py:3);work (b/step.py:10) 30\nmain (a/cli.py:3);work (b/step.py:12) 10\nmain (a/cli.py:4) 5\n"
    )
    first, second = from_samples(raw)
    assert (first.function, first.own, first.total) == ("work (b/step.py)", 0.2, 0.2)
    assert (second.function, second.own, second.total) == ("main (a/cli.py)", 0.025, 0.225)


def test_no_figure_of_the_page_is_typed_by_hand() -> None:
    text = report.PAGE.read_text(encoding="utf-8")
    assert report.rendered(text) == text, "run `python -m bench.report`"
    text = report.SCALE.read_text(encoding="utf-8")
    assert report.rendered_scale(text) == text, "run `python -m bench.report`"


def test_an_engine_that_did_not_run_is_listed_with_its_reason_and_the_others_with_their_ratios() -> None:
    rows = [
        {"engine": "Evertick, process", "is_reference": True, "chain_s": 0.1, "runs_per_s": 500},
        {"engine": "Evertick, warm", "is_reference": True, "chain_s": 0.05, "runs_per_s": 5000},
        {"engine": "Slow", "chain_s": 40, "runs_per_s": 5, "note": "a process per task"},
        {"engine": "Absent", "problem": "there is no wheel"},
    ]
    page = report.peers_section({"settings": {"measured_at": "now"}, "rows": rows})
    assert "| Evertick, process | 0.1 | – | – | 500 | – |" in page
    assert "| Slow | 40 (×400, ×800) | – | – | 5 (×100, ×1,000) | – | a process per task |" in page
    assert "| Absent | NOT RUN |" in page
    assert "there is no wheel" in page


def test_a_profile_replaces_the_one_of_its_name_and_is_shown_with_its_dearest_rows(tmp_path: Path) -> None:
    kept = tmp_path / "profiles.json"
    costs = Shown(title="Costs", heads=["what", "per task"], rows=[["a|b", str(number)] for number in range(20)])
    dead = Shown(title="Dead rows over time", heads=["s", "task"], rows=[["0", "1"]])
    profiles.keep("chain, warm", "before", [dead], kept)
    profiles.keep("chain, warm", "now", [costs, dead], kept)
    profiles.keep("cron", "fires", [], kept)
    found = profiles.read(kept)
    assert list(found) == ["chain, warm", "cron"]
    assert found["chain, warm"].tables[0].rows == costs.rows
    page = report.profiles_section(found)
    assert "before" not in page and "Dead rows" not in page
    assert "| a\\|b | 15 |" in page and "| a\\|b | 16 |" not in page


def event(name: str, began: float, ended: float, rows: int = 1) -> Event:
    return Event(ended, name, ended - began, rows, None, None)


def test_the_way_of_a_fire_is_taken_apart_by_the_statements_on_it() -> None:
    fire = way.Fire(10.0, 10.010)
    notify = "select set_config('synchronous_commit', 'off', true), pg_noti"
    leader = [
        event("schedules.due", 10.001, 10.002),
        event("fire_schedules", 10.003, 10.004),
        event(notify, 10.005, 10.02),
    ]
    runner = [event("finish_and_claim", 10.006, 10.008), event("finish_and_claim", 10.0085, 10.009, rows=0)]
    assert way.taken_apart(fire, leader, runner) == pytest.approx([1, 2, 1, 1, 1, 2, 2])
    # Planned ahead: what is due is read afterwards, for the next one.
    ahead = [*leader[1:2], event("schedules.due", 10.0045, 10.0048), *leader[2:]]
    assert way.taken_apart(fire, ahead, runner) == pytest.approx([3, 0, 1, 1, 1, 2, 2])
    assert way.taken_apart(fire, leader[:1], runner) is None
    assert way.taken_apart(way.Fire(10.0035, 10.010), leader[1:], runner) is None, "that was the fire before"
    assert way.taken_apart(fire, leader, []) is None


def compared(unit: str, pairs: list[tuple[float, float]], goal: Goal | None = None) -> Comparison:
    return Comparison(figure=Figure(name="a", about="", unit=unit, value=1, goal=goal), pairs=pairs)


def test_a_longer_time_and_a_lower_rate_are_worse() -> None:
    assert compared("ms", [(1.0, 1.2)] * 4).is_worse
    assert not compared("ms", [(1.2, 1.0)] * 4).is_worse
    assert compared("runs/s", [(120, 100)] * 4).is_worse
    assert compared("ratio", [(1.2, 1.0)] * 4, at_least(0.9)).is_worse
    assert not compared("ratio", [(1.2, 1.0)] * 4, at_most(2)).is_worse


def test_a_figure_is_worse_only_by_more_than_five_percent_and_in_most_pairs() -> None:
    assert not compared("ms", [(1.0, 1.04)] * 5).is_worse
    assert not compared("ms", [(1.0, 1.5), (1.0, 0.9), (1.0, 1.5), (1.0, 0.8), (1.0, 1.6)]).is_worse
