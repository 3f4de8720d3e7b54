"""Mapping over expressions, names of instances, a mapped branch, and mapped task groups."""

from __future__ import annotations

from airflow.exceptions import AirflowSkipException
from airflow.sdk import dag, task, task_group


@task
def numbers():
    return [1, 2, 3]


@task
def rows():
    return ["a", "b"]


@task
def by_key():
    return {"x": 1, "y": 2}


@task
def half(number):
    return number if number > 1 else None


@task(map_index_template="{{ shown }}")
def show(value):
    from airflow.sdk import get_current_context

    get_current_context()["shown"] = f"value {value}"
    return list(value) if isinstance(value, tuple) else value


@task
def pair(one, two):
    return [list(one) if isinstance(one, tuple) else one, two]


@task.branch
def choose(number):
    return "left"


@task
def side():
    return "side"


@dag(schedule=None, is_paused_upon_creation=False)
def expressions():
    first = numbers()
    halves = half.expand(number=first)
    show.override(task_id="doubled").expand(value=first.map(lambda each: 2 * each))
    show.override(task_id="zipped").expand(value=first.zip(rows(), fillvalue=0))
    show.override(task_id="joined").expand(value=first.concat(halves))
    show.override(task_id="plain").expand(value=rows())
    show.override(task_id="items").expand(value=by_key.override(task_id="dict")())
    pair.override(task_id="pairs").expand(one=first.zip(halves), two=rows())
    pair.override(task_id="dicts").expand_kwargs(first.map(lambda each: {"one": each, "two": 0}))
    choose.expand(number=[1, 2]) >> [side.override(task_id="left")(), side.override(task_id="right")()]


@task
def only_odd(number):
    if number % 2 == 0:
        raise AirflowSkipException("even")
    return number


@task.branch
def small_or_large(number):
    return "each.small" if number < 3 else "each.large"


@task(trigger_rule="none_failed_min_one_success")
def told(number, was):
    return [number, was]


@task
def total(values):
    return list(values)


@task(trigger_rule="all_done")
def ended():
    return "ended"


@task_group
def each(number, factor):
    value = show.override(task_id="value", map_index_template="number {{ shown }}")(number)
    chosen = small_or_large(value)
    results = side.override(task_id="small")(), side.override(task_id="large")()
    chosen >> results
    last = told(value, factor)
    results >> last
    return last


@task_group
def literal(name, row):
    only_odd(row) >> ended()


@dag(schedule=None, is_paused_upon_creation=False)
def groups():
    total(each.partial(factor=2).expand(number=numbers().map(lambda number: number + 1)))
    literal.expand(name={"a": 1}, row=[1, 2, 3]) >> ended()
    each.override(group_id="none").partial(factor=2).expand(number=nothing())


@task
def nothing():
    return []


expressions()
groups()
