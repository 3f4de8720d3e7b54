"""`.expand(...)`: what is published, what each instance is called with, and what is refused where it is written."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from evertick import Skip, TaskContext, dag, task, task_group
from evertick.domain.dags.mapping import MapHow, MappedList
from evertick.domain.dags.spec import from_json, to_json
from evertick.domain.errors import InvalidDag, UserError
from evertick.engine.publish import dag_row
from evertick.sdk.runtime import CompiledDag, entered


@task
def source() -> list[int]:
    return [1, 2]


@task
def add(x: int, y: int = 0, *, context: TaskContext) -> tuple[int, int, int]:
    return x, y, context.map_index


@task
def gather(values: list[object]) -> int:
    return len(values)


def compiled(build: object) -> CompiledDag:
    @dag(name="sample")
    def sample() -> None:
        build()  # type: ignore[operator]

    return sample()


def called(of: CompiledDag, name: str, inputs: dict[str, object], map_index: int = 0) -> object:
    with entered(TaskContext(run_id=1, dag="sample", task=name, map_index=map_index)):
        args, kwargs = of.tasks[name].call_arguments(inputs)
        function = of.tasks[name].function
        assert function is not None
        return function(*args, **kwargs)


def test_lists_and_results_are_published_and_each_instance_is_called_with_its_elements() -> None:
    made = compiled(lambda: gather(add.expand(x=source(), y=(10, 20))))
    spec = {each.name: each for each in made.spec.tasks}["add"]
    assert spec.mapping is not None
    assert spec.mapping.lists == (MappedList(argument="x", task="source"), MappedList(argument="y", length=2))
    assert spec.inputs == ()
    assert from_json(to_json(made.spec)) == made.spec
    row = dag_row(made.spec, file="f.py", bundle_hash="b")
    assert row["mappings"] == [{"idx": 1, "how": "product", "most": 10_000}]
    assert row["lists"] == [
        {"idx": 1, "place": 0, "src": 0, "length": None},
        {"idx": 1, "place": 1, "src": None, "length": 2},
    ]
    assert called(made, "add", {"": [7, 1]}, 3) == (7, 20, 3)


def test_what_partial_gives_is_the_same_for_all_and_may_be_a_result() -> None:
    made = compiled(lambda: add.override(max_instances=5).partial(y=source()).expand(x=[1, 2, 3]))
    spec = made.spec.tasks[1]
    assert spec.mapping is not None and spec.mapping.most == 5
    assert spec.inputs == ("source",)
    assert called(made, "add", {"source": 9, "": [2]}) == (3, 9, 0)


def test_a_list_of_dicts_names_all_arguments() -> None:
    made = compiled(lambda: add.expand_kwargs([{"x": 1}, {"x": 2, "y": 3}]))
    assert called(made, "add", {"": [1]}, 1) == (2, 3, 1)
    given = compiled(lambda: add.expand_kwargs(source()))
    assert given.spec.tasks[1].mapping is not None and given.spec.tasks[1].mapping.how is MapHow.KWARGS
    assert called(given, "add", {"": [{"x": 5, "y": 6}]}) == (5, 6, 0)


def test_a_list_that_became_shorter_since_it_was_published_says_so() -> None:
    made = compiled(lambda: add.expand(x=[1]))
    with pytest.raises(UserError, match="build the same lists at every import"):
        called(made, "add", {"": [4]})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: add.expand(), "expands over nothing"),
        (lambda: add.expand(z=[1]), "wrong arguments for task 'add'"),
        (lambda: add.expand(y=[1]), "missing a required argument: 'x'"),
        (lambda: add.partial(x=1).expand(x=[1]), "gets argument 'x' twice"),
        (lambda: add.expand(x={"a": 1}), "x is a dict; expand over list"),
        (lambda: add.expand(x="abc"), "must be a list or the result of a task, not 'abc'"),
        (lambda: add.expand(x=[source()]), "let one task return the whole list"),
        (lambda: add.expand(x=source()["rows"]), "is a part of a result"),
        (lambda: add.expand_kwargs([1]), "takes a list of dicts of arguments, but it contains 1"),
        (lambda: add.expand_kwargs([{"q": 1}]), "wrong arguments for task 'add'"),
        (lambda: add.expand_zip(x=[1], y=[1, 2]), "lists of equal length, not of 1, 2"),
        (lambda: add.expand(x=range(200), y=range(200)), "expands to 40,000 instances, and at most 10,000 are allowed"),
        (lambda: add.override(max_instances=0).expand(x=[1]), "max_instances is 0; it must be from 1 to 100,000"),
        (lambda: add.override(trigger_rule="always").expand(x=source()), "may start it before that task has ended"),
        (lambda: add.override(setup=True).expand(x=[1]), "is a setup and cannot be mapped"),
        (lambda: add.override(order={"k": 1}).expand(x=[1]), "is mapped: `order` is not allowed"),
        (lambda: gather(add.partial(x=1)), "not expanded yet> cannot be passed to a task"),
    ],
)
def test_bad_input_is_refused_where_it_is_written(build: object, message: str) -> None:
    with pytest.raises(InvalidDag, match=message.replace("(", r"\(")):
        compiled(build)


@task
def read(name: str) -> str:
    if not name:
        raise Skip("nothing to read")
    return name * 2


@task
def store(name: str, rows: str, table: str) -> str:
    return f"{name} {rows} {table}"


@task
def names_of() -> list[str]:
    return ["a", "b", ""]


@task(trigger_rule="all_done")
def gathered(stored: list[str]) -> list[str]:
    return stored


@task_group
def load(name: str, table: str = "t") -> str:
    return store(name, read(name), table)


def test_a_mapped_group_runs_each_index_by_itself() -> None:
    @dag
    def loads() -> None:
        gathered(load.partial(table="orders").expand(name=names_of()))

    made = loads.build()
    (group,) = made.spec.mapped_groups
    assert (group.name, [each.task for each in group.mapping.lists]) == ("load", ["names_of"])
    done = made.test()
    assert done.state == "success"
    assert done.results["gathered"] == ["a aa orders", "b bb orders"]
    assert {name: state for name, state in done.states.items() if state != "success"} == {
        "load.read[2]": "skipped",
        "load.store[2]": "skipped",
    }


def test_a_group_takes_dicts_and_defaults_and_is_a_plain_group_when_called() -> None:
    @dag
    def loads() -> None:
        @task_group("pairs", max_active=2)
        def pairs(name: str, table: str = "default") -> None:
            store(name, "r", table)

        pairs.expand_kwargs([{"name": "a"}, {"name": "b", "table": "x"}]) >> names_of()
        load("plain")

    done = loads.test()
    assert [done.results[f"pairs.store[{index}]"] for index in (0, 1)] == ["a r default", "b r x"]
    assert done.results["load.store"] == "plain plainplain t"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: load.expand(nam=["a"]), "wrong arguments for task group 'load': missing a required argument: 'name'"),
        (lambda: load.expand(name="abc"), "task group 'load': name must be a list or the result of a task"),
        (lambda: task_group("g", retries=1)(read.function).expand(name=["a"]), "has retries and cannot be mapped"),
        (
            lambda: task_group("g")(lambda x: read.expand(name=x)).expand(x=[1]),
            "must be a list or the result of a task",
        ),
        (lambda: task_group("g")(lambda x: read(f"{x}")).expand(x=[1]), "cannot become part of a text"),
        (lambda: task_group("g")(lambda x: read(x).as_setup()).expand(x=["a"]), "'g.read' is a setup or teardown"),
    ],
)
def test_wrong_uses_of_a_mapped_group_are_refused(wrong: Callable[[], object], message: str) -> None:
    @dag
    def broken() -> None:
        wrong()

    with pytest.raises(InvalidDag, match=re.escape(message)):
        broken.build()
