"""A DAG and its tests in one file: `pytest test_a_dag_in_ci.py` needs no server and no database."""

from evertick import Param, dag, task
from evertick.testing import simulate


@task
def extract(count: int) -> list[int]:
    return list(range(count))


@task
def load(rows: list[int]) -> int:
    if not rows:
        raise ValueError("no rows")
    return len(rows)


@dag(schedule="30 2 * * MON-FRI", timezone="Europe/Berlin")
def nightly(count: int = Param(3, minimum=0)) -> None:
    load(extract(count))


def test_all_rows_are_loaded() -> None:
    ran = nightly.test(params={"count": 5})
    assert ran.state == "success" and ran.results["load"] == 5


def test_an_empty_source_fails_the_run() -> None:
    ran = nightly.test(params={"count": 0})
    assert ran.state == "failed" and "no rows" in ran.reasons["load"]


def test_the_schedule_skips_the_weekend() -> None:
    week = simulate(nightly, "2030-01-07", "2030-01-14")
    assert [fire.local.weekday() for fire in week.fires] == [0, 1, 2, 3, 4]
