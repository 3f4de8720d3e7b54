"""`task["name"]`: parts of results in a DAG's function."""

from __future__ import annotations

import pytest

from evertick import dag, push, task
from evertick.domain.errors import InvalidDag, UserError


@task(outputs=["rows", "path"])
def extract() -> dict[str, int]:
    return {}


@task
def load(rows: object) -> None: ...


def test_a_part_makes_its_task_an_input_once() -> None:
    @dag
    def d() -> None:
        out = extract()
        load([out["rows"], out["path"]["deep"][0]])

    spec = d().spec
    assert spec.tasks[1].inputs == ("extract",)
    assert spec.tasks[0].outputs == ("rows", "path")


def test_a_part_takes_arrows_as_the_task_does() -> None:
    @dag
    def d() -> None:
        extract()["rows"] >> load(1)

    assert d().spec.edges == ((0, 1),)


def test_a_name_that_the_task_does_not_promise_is_refused() -> None:
    @dag
    def d() -> None:
        load(extract()["row"])

    with pytest.raises(InvalidDag, match="task 'extract' has no output 'row'; it has: rows, path"):
        d()


def test_a_result_cannot_be_looped_over_or_asked_for_nonsense() -> None:
    @dag
    def loops() -> None:
        for each in extract():
            load(each)

    @dag
    def asks() -> None:
        load(extract()[1.5])  # type: ignore[index]

    with pytest.raises(InvalidDag, match="cannot loop over it"):
        loops()
    with pytest.raises(InvalidDag, match=r"not 1\.5"):
        asks()


@pytest.mark.parametrize("outputs", ["rows", [1], [""], 5])
def test_outputs_are_a_list_of_names(outputs: object) -> None:
    with pytest.raises(InvalidDag, match="outputs is"):
        task(outputs=outputs)(lambda: None)  # type: ignore[arg-type]


def test_push_works_only_in_a_task() -> None:
    with pytest.raises(UserError, match="no task is running here"):
        push("a", 1)
