"""Branches, short-circuits, setups and teardowns as they are written, and `dag.test()`, which runs them here."""

from __future__ import annotations

import pytest

from evertick import (
    Fail,
    Param,
    RetryAfter,
    Skip,
    TaskContext,
    dag,
    setup,
    shell,
    task,
    task_group,
    teardown,
    trigger_dag,
)
from evertick.domain.dags.graph import leaves
from evertick.domain.dags.spec import BranchChoice, ChildSpec, from_json, to_json
from evertick.domain.errors import InvalidDag, InvalidParams
from evertick.domain.states import TriggerRule
from evertick.engine.publish import dag_row
from evertick.examples import branches, deadlines, etl, failures, groups, heartbeat, limits, mapping, pipeline, pools
from evertick.sdk.runtime import CompiledDag


@task
def one() -> int:
    return 1


@task
def two() -> int:
    return 2


@task(trigger_rule="none_failed_min_one_success")
def join(first: int | None, second: int | None) -> int:
    return (first or 0) + (second or 0)


@task.branch
def pick(context: TaskContext) -> object:
    return context.params["way"]


@task.short_circuit
def gate(context: TaskContext) -> object:
    return context.params["way"]


@setup
def make() -> str:
    return "it"


@teardown
def drop(what: str) -> None:
    print("drop", what)


def compiled(build: object, **options: object) -> CompiledDag:
    @dag(name="sample", **options)  # type: ignore[misc, arg-type]
    def sample() -> None:
        build()  # type: ignore[operator]

    return sample()


def test_kinds_are_published() -> None:
    def build() -> None:
        made, first = make(), one()
        pick() >> [first, gate() >> two()]
        first >> drop(made)

    made = compiled(build, params={"way": None})
    found = {each.name: each for each in made.spec.tasks}
    assert (found["pick"].choice, found["gate"].choice) == (BranchChoice.BRANCH, BranchChoice.SHORT_CIRCUIT)
    assert found["make"].is_setup and found["drop"].is_teardown
    assert found["drop"].trigger_rule is TriggerRule.ALL_DONE_SETUP_SUCCESS
    assert from_json(to_json(made.spec)) == made.spec
    assert {made.spec.tasks[idx].name for idx in leaves(made.spec)} == {"make", "one", "two"}


def test_a_called_task_becomes_setup_or_teardown_and_a_group_goes_on_without_its_teardowns() -> None:
    def build() -> None:
        with task_group("g") as group:
            first = one()
            work = two()
            first >> work >> shell("clean", "true").as_teardown(setups=first, on_failure_fail_dagrun=True)
        group >> shell("after", "true")

    made = compiled(build)
    found = {each.name: each for each in made.spec.tasks}
    assert found["g.one"].is_setup and found["g.clean"].is_teardown and found["g.clean"].fails_run
    names = [each.name for each in made.spec.tasks]
    edges = {(names[up], names[down]) for up, down in made.spec.edges}
    assert edges == {("g.one", "g.two"), ("g.two", "g.clean"), ("g.one", "g.clean"), ("g.two", "after")}


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("one", {"one": "success", "g.two": "skipped", "join": "success"}),
        ("g", {"one": "skipped", "g.two": "success", "join": "success"}),
        (["one", "g.two"], {"one": "success", "g.two": "success", "join": "success"}),
        (None, {"one": "skipped", "g.two": "skipped", "join": "skipped"}),
        ("join", {"pick": "failed", "one": "upstream_failed", "g.two": "upstream_failed"}),
    ],
)
def test_a_branch_goes_the_way_that_it_names(way: object, expected: dict[str, str]) -> None:
    def build() -> None:
        first = one()
        with task_group("g"):
            second = two()
        pick() >> [first, second]
        join(first, second)

    ran = compiled(build, params={"way": Param(None)}).test(params={"way": way})
    assert {name: ran.states[name] for name in expected} == expected
    if way == "join":
        assert "return one of one, g.two, or None" in ran.reasons["pick"]


def test_a_test_run_goes_by_params_retries_skips_and_mapping() -> None:
    tries: list[int] = []

    @task(retries=2, retry_delay="1h")
    def flaky(context: TaskContext) -> list[int]:
        tries.append(context.attempt)
        if context.attempt < 3:
            raise RetryAfter(3600) if context.attempt == 1 else OSError("again")
        return list(range(context.params["count"]))

    @task
    async def half(x: int) -> int:
        if x == 1:
            raise Skip("odd")
        return x * 10

    @task(trigger_rule="none_failed")
    def gather(values: list[int]) -> list[int]:
        return values

    @task(retries=5)
    def doomed() -> None:
        raise Fail("no use")

    @dag(params={"count": Param(3, minimum=0)})
    def sample() -> None:
        gather(half.expand(x=flaky()))
        doomed() >> shell("never", "true")

    ran = sample.test()
    assert tries == [1, 2, 3]
    assert ran.state == "failed"
    assert ran.results["gather"] == [0, 20]
    assert (ran.states["half[1]"], ran.reasons["half[1]"]) == ("skipped", "odd")
    assert (ran.states["doomed"], ran.states["never"]) == ("failed", "upstream_failed")
    assert sample.test(params={"count": 0}).states["half"] == "skipped"
    with pytest.raises(InvalidParams, match="count"):
        sample.test(params={"count": -1})
    with pytest.raises(Fail, match="no use"):
        sample.test(raise_errors=True)


def test_a_failing_shell_task_and_a_result_that_is_no_json_fail_their_tasks() -> None:
    @task
    def strange() -> object:
        return object()

    ran = compiled(lambda: (strange(), shell("bad", "exit 3"), shell("good", 'test "$X" = 1', env={"X": one()}))).test()
    assert ran.states == {"strange": "failed", "bad": "failed", "one": "success", "good": "success"}
    assert "exited with code 3" in ran.reasons["bad"]


@pytest.mark.parametrize(
    "example",
    [
        etl.etl,
        heartbeat.heartbeat,
        mapping.mapping,
        branches.branches,
        pipeline.pipeline,
        groups.groups,
        failures.failures,
        limits.limits,
        pools.pools,
        deadlines.deadlines,
    ],
)
def test_an_example_runs_here(example: object) -> None:
    assert example.test().state == "success"  # type: ignore[attr-defined]


def test_a_task_that_starts_a_dag_is_published_and_needs_nothing_here() -> None:
    made = compiled(lambda: one() >> trigger_dag("other", params={"day": [1, 2]}, wait=False, timeout="5m"))
    child = made.spec.tasks[1]
    assert (child.name, child.kind, child.timeout_seconds) == ("trigger_other", "trigger", 300.0)
    assert child.child == ChildSpec(dag="other", params={"day": [1, 2]}, waits=False)
    assert from_json(to_json(made.spec)) == made.spec
    row = dag_row(made.spec, file="f.py", bundle_hash="b")
    expected = {"idx": 1, "dag": "other", "params": {"day": [1, 2]}, "given": None, "waits": False, "timeout": 300.0}
    assert row["children"] == [expected]
    assert made.test().states == {"one": "success", "trigger_other": "success"}


def test_a_started_dag_is_given_results_and_parameters() -> None:
    @dag
    def caller(day: str = Param("monday")) -> None:  # type: ignore[assignment]
        trigger_dag("other", params={"rows": one(), "part": one()["n"], "day": day, "fixed": [1]})

    spec = caller.build().spec
    child = next(task for task in spec.tasks if task.child is not None)
    assert child.inputs == ("one", "one__1")
    assert child.child == ChildSpec(
        dag="other",
        params={"fixed": [1]},
        given={"rows": {"task": "one", "path": []}, "part": {"task": "one__1", "path": ["n"]}, "day": {"param": "day"}},
    )
    assert from_json(to_json(spec)) == spec
    with pytest.raises(InvalidDag, match="param 'x' must be a constant, the result of a task"):
        compiled(lambda: trigger_dag("other", params={"x": [one()]}))


def test_the_plain_function_can_be_called() -> None:
    assert join.function(1, 2) == 3


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: trigger_dag(""), "takes the name of a DAG"),
        (lambda: trigger_dag("other", wait="yes"), "wait must be True or False"),
        (lambda: trigger_dag("other", params=[1]), "params must be a dict"),
        (lambda: trigger_dag("other", params={"x": {"y": one()}}), "param 'x' must be a constant"),
        (lambda: trigger_dag("other", retries=3), "starts a DAG and does not run on a runner"),
        (lambda: trigger_dag("other", pool="p"), "starts a DAG and does not run on a runner"),
        (lambda: trigger_dag("sample"), "start their own DAG"),
        (lambda: pick(), "has no downstream tasks to choose from"),
        (lambda: pick.expand(context=[1]), "is a branch and cannot be mapped"),
        (lambda: make().as_teardown(), "is both a setup and a teardown"),
        (lambda: one().as_teardown(setups=["x"]), "setups must be called tasks"),
        (lambda: one().as_teardown(on_failure_fail_dagrun=1), "must be True or False"),
        (lambda: task.short_circuit(ignore_downstream_trigger_rules=1), "must be True or False"),
        (lambda: teardown(on_failure_fail_dagrun="yes"), "must be True or False"),
    ],
)
def test_bad_input_is_refused_where_it_is_written(build: object, message: str) -> None:
    with pytest.raises(InvalidDag, match=message):
        compiled(build, params={"way": None})
