"""From a compiled DAG back to the call: arguments, context, environment, and the ways a task can end itself."""

from __future__ import annotations

import logging
from collections import OrderedDict
from datetime import timedelta

import pytest

from evertick import Fail, RetryAfter, Skip, TaskContext, current_context, dag, shell, task
from evertick.domain.errors import NotFound, UserError
from evertick.sdk.runtime import BoundTask, CompiledDag, entered, find_task


@task
def extract() -> list[int]:
    return [1, 2]


@task
def load(rows: object, *, options: object = None, context: TaskContext) -> tuple[object, object, str]:
    return rows, options, context.task


@dag
def sample() -> None:
    rows = extract()
    load([rows, {"again": rows, "constant": (1, rows)}], options={"fixed": True})
    shell("count", "wc -l", env={"ROWS": rows, "TEXT": "as it is", "NUMBER": 3})


@pytest.fixture
def compiled() -> CompiledDag:
    return sample()


def bound(compiled: CompiledDag, name: str) -> BoundTask:
    return find_task({compiled.name: compiled}, "sample", name)


def test_results_take_the_place_of_their_tasks(compiled: CompiledDag) -> None:
    loading = bound(compiled, "load")
    with entered(TaskContext(run_id=1, dag="sample", task="load")) as context:
        args, kwargs = loading.call_arguments({"extract": [7]})
    assert args == ([[7], {"again": [7], "constant": (1, [7])}],)
    assert kwargs == {"options": {"fixed": True}, "context": context}
    assert loading.function is not None
    assert loading.function(*args, **kwargs)[2] == "load"


def test_a_task_without_a_result_gives_none(compiled: CompiledDag) -> None:
    with entered(TaskContext(run_id=1, dag="sample", task="load")):
        args, _ = bound(compiled, "load").call_arguments({})
    assert args == ([None, {"again": None, "constant": (1, None)}],)


def test_calling_twice_gives_fresh_containers(compiled: CompiledDag) -> None:
    with entered(TaskContext(run_id=1, dag="sample", task="load")):
        first, _ = bound(compiled, "load").call_arguments({"extract": 1})
        second, _ = bound(compiled, "load").call_arguments({"extract": 2})
    assert first[0] is not second[0]


def test_constants_arrive_as_the_objects_they_are() -> None:
    constant = OrderedDict(a=1)
    compiled = dag(name="sample")(lambda: load.override(name="load")(constant))()
    with entered(TaskContext(run_id=1, dag="sample", task="load")):
        args, _ = bound(compiled, "load").call_arguments({})
    assert args[0] is constant


def test_a_shell_task_gets_text_as_text_and_the_rest_as_json(compiled: CompiledDag) -> None:
    counting = bound(compiled, "count")
    assert counting.command == "wc -l"
    assert counting.environment({"extract": [7, 8]}) == {"ROWS": "[7, 8]", "TEXT": "as it is", "NUMBER": "3"}
    assert counting.environment({})["ROWS"] == "null"


def test_unknown_names_are_refused_with_what_there_is(compiled: CompiledDag) -> None:
    with pytest.raises(NotFound, match="no DAG 'other'; it has: sample"):
        find_task({"sample": compiled}, "other", "load")
    with pytest.raises(NotFound, match="DAG 'sample' has no task 'ghost'"):
        find_task({"sample": compiled}, "sample", "ghost")


def test_an_argument_named_context_that_is_passed_is_not_replaced() -> None:
    @task
    def tell(context: object) -> object:
        return context

    compiled = dag(name="sample")(lambda: [tell(context="mine"), tell("yours")])()
    assert bound(compiled, "tell").call_arguments({}) == ((), {"context": "mine"})
    assert bound(compiled, "tell__1").call_arguments({}) == (("yours",), {})


def test_the_current_context_is_the_one_entered_last() -> None:
    outer = TaskContext(run_id=1, dag="d", task="outer")
    inner = TaskContext(run_id=1, dag="d", task="inner")
    with entered(outer):
        with entered(inner):
            assert current_context() is inner
        assert current_context() is outer
    with pytest.raises(UserError, match="no task is running here"):
        current_context()


def test_a_context_says_when_it_is_cancelled_and_logs_under_one_name() -> None:
    context = TaskContext(run_id=1, dag="d", task="t")
    assert not context.is_cancelled()
    context.cancelled.set()
    assert context.is_cancelled()
    assert context.logger is logging.getLogger("evertick.task")


def test_signals_carry_their_reasons() -> None:
    assert Skip("nothing new").reason == "nothing new"
    assert Fail("wrong password").no_retry
    assert not Fail("try again", no_retry=False).no_retry
    assert RetryAfter(timedelta(minutes=1), "throttled").seconds == 60.0
    assert str(RetryAfter(5, "throttled")) == "throttled"
