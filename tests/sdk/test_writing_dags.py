"""How users write DAGs, and what these compile to."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from evertick import Asset, Param, after, any_of, chain, dag, finished, shell, task, task_group
from evertick.domain.attempt import Isolation
from evertick.domain.dags.spec import DagSpec, DatabaseOutagePolicy, TaskKind, TaskSpec, from_json, to_json
from evertick.domain.errors import InvalidDag
from evertick.domain.retry import Backoff, RetryPolicy
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import describe
from evertick.domain.states import TriggerRule
from evertick.sdk.runtime import CompiledDag


@task
def extract(table: str = "t") -> str:
    """Read a table."""
    return table


@task
def load(rows: object = None, *more: object) -> None: ...


def built(body: Callable[[], object]) -> CompiledDag:
    return dag(name="sample")(body)()


def arrows(compiled: CompiledDag) -> set[str]:
    spec = compiled.spec
    return {f"{spec.tasks[up].name} >> {spec.tasks[down].name}" for up, down in spec.edges}


def spec_of(compiled: CompiledDag, name: str) -> TaskSpec:
    return next(task for task in compiled.spec.tasks if task.name == name)


# --- results and arrows ---


def test_passing_a_result_makes_an_edge_and_an_input() -> None:
    compiled = built(lambda: load(extract()))
    assert arrows(compiled) == {"extract >> load"}
    assert spec_of(compiled, "load").inputs == ("extract",)


def test_results_may_be_nested_in_lists_tuples_and_dicts() -> None:
    def body() -> None:
        load([extract(), {"deep": (extract(), 1)}], more := extract(), more)

    compiled = built(body)
    assert spec_of(compiled, "load").inputs == ("extract", "extract__1", "extract__2")
    assert len(compiled.spec.edges) == 3


def test_arrows_alone_pass_no_result() -> None:
    def body() -> None:
        extract() >> load()

    compiled = built(body)
    assert arrows(compiled) == {"extract >> load"}
    assert spec_of(compiled, "load").inputs == ()


def test_arrows_chain_and_take_lists_on_either_side() -> None:
    def body() -> None:
        a, b, c, d = (extract.override(name=name)() for name in "abcd")
        a >> [b, c] >> d
        e = load.override(name="e")()
        e << [d, (a,)]
        [b, c] << load.override(name="f")()

    assert arrows(built(body)) == {
        *("a >> b", "a >> c", "b >> d", "c >> d"),
        *("d >> e", "a >> e"),
        *("f >> b", "f >> c"),
    }


def test_a_chain_adds_the_same_dependencies() -> None:
    def body() -> None:
        a, b, c, d = (extract.override(name=name)() for name in "abcd")
        chain(a, [b, c], d)

    assert arrows(built(body)) == {"a >> b", "a >> c", "b >> d", "c >> d"}


def test_the_same_arrow_twice_is_one_edge() -> None:
    def body() -> None:
        first = extract()
        second = load(first)
        first >> second
        second << first

    assert len(built(body).spec.edges) == 1


def test_a_function_with_a_name_of_its_own_may_be_called_in_a_loop() -> None:
    @dag
    def sample() -> None:
        named = task(name="light")(lambda: 1)
        [named() for _ in range(3)]

    assert sorted(sample().tasks) == ["light", "light__1", "light__2"]


def test_a_task_called_again_is_numbered_as_in_airflow() -> None:
    def body() -> None:
        for _ in range(3):
            extract()
        extract.override(name="extract__7")()
        extract()

    names = [spec.name for spec in built(body).spec.tasks]
    assert names == ["extract", "extract__1", "extract__2", "extract__7", "extract__8"]


def test_override_changes_options_and_keeps_the_rest() -> None:
    careful = task(retries=2, queue="slow")(extract.function)

    compiled = built(lambda: careful.override(name="other", retries=5)())
    assert spec_of(compiled, "other").retry.retries == 5
    assert spec_of(compiled, "other").queue == "slow"


def test_the_plain_function_stays_callable() -> None:
    assert extract.function("orders") == "orders"


# --- groups ---


def test_groups_prefix_names_and_nest() -> None:
    def body() -> None:
        with task_group("in"):
            extract()
            with task_group("deep"):
                extract()
        extract()

    compiled = built(body)
    assert {spec.name: spec.group for spec in compiled.spec.tasks} == {
        "in.extract": "in",
        "in.deep.extract": "in.deep",
        "extract": None,
    }


def test_arrows_of_a_group_lead_to_its_first_and_from_its_last_tasks() -> None:
    def body() -> None:
        start, end = extract.override(name="start")(), load.override(name="end")()
        with task_group("g") as group:
            a, b = extract.override(name="a")(), extract.override(name="b")()
            load.override(name="c")([a, b])
        start >> group >> end

    assert arrows(built(body)) == {"start >> g.a", "start >> g.b", "g.a >> g.c", "g.b >> g.c", "g.c >> end"}


def test_a_group_may_follow_a_group() -> None:
    def body() -> None:
        with task_group("one") as one:
            extract()
        with task_group("two") as two:
            load()
        one >> two

    assert arrows(built(body)) == {"one.extract >> two.load"}


# --- options ---


def test_every_task_option_reaches_the_spec() -> None:
    @task(
        name="named",
        retries=4,
        retry_delay=timedelta(minutes=1),
        retry_backoff="exponential",
        retry_max_delay="1h30m",
        retry_jitter=0.1,
        timeout="90s",
        queue_timeout=timedelta(minutes=2),
        queue="gpu",
        priority=9,
        trigger_rule="all_done",
        isolation="warm",
        rerun_on_loss=False,
        on_lost_contact="stop",
        setup=True,
    )
    async def anything() -> None:
        """What it does.

        At length.
        """

    assert spec_of(built(anything), "named") == TaskSpec(
        name="named",
        retry=RetryPolicy(
            retries=4, delay_seconds=60.0, backoff=Backoff.EXPONENTIAL, max_delay_seconds=5400.0, jitter=0.1
        ),
        timeout_seconds=90.0,
        queue_timeout_seconds=120.0,
        queue="gpu",
        priority=9,
        trigger_rule=TriggerRule.ALL_DONE,
        isolation=Isolation.WARM,
        rerun_on_loss=False,
        on_lost_contact=DatabaseOutagePolicy.STOP,
        is_setup=True,
        is_async=True,
        doc="What it does.\n\nAt length.",
    )


def test_task_defaults_hold_for_tasks_that_do_not_say_otherwise() -> None:
    stubborn = task(retries=9)(load.function)

    @dag(task_defaults={"retries": 2, "queue": "q"})
    def sample() -> None:
        extract()
        stubborn()
        shell("ls")

    compiled = sample()
    retries = {spec.name: spec.retry.retries for spec in compiled.spec.tasks}
    assert retries == {"extract": 2, "load": 9, "shell": 2}
    assert {spec.queue for spec in compiled.spec.tasks} == {"q"}


def test_shell_tasks_carry_their_command() -> None:
    def body() -> None:
        shell("archive", "tar c .", env={"ROWS": extract(), "MODE": "fast"}, retries=1)
        shell("echo one")
        shell("echo two", name="said")
        shell("echo three")

    compiled = built(body)
    archive = spec_of(compiled, "archive")
    assert (archive.kind, archive.command, archive.inputs) == (TaskKind.SHELL, "tar c .", ("extract",))
    assert [spec.name for spec in compiled.spec.tasks] == ["extract", "shell", "said", "shell__1", "archive"]


def test_every_dag_option_reaches_the_spec() -> None:
    @dag(
        name="named",
        description="All of it",
        owner="ann@shop.example",
        schedule="0 6 * * *",
        timezone="Europe/Berlin",
        start_at=datetime(2030, 1, 1, tzinfo=UTC),
        end_at="2031-01-01T00:00:00Z",
        misfire="all",
        catchup_window=timedelta(hours=2),
        params={"n": Param(1, minimum=0), "plain": "x"},
        tags={"b", "a"},
        max_active_runs=3,
        run_timeout="1h",
        paused=True,
    )
    def anything() -> None:
        extract()

    spec: DagSpec = anything().spec
    assert (spec.name, spec.description, spec.tags, spec.max_active_runs) == ("named", "All of it", ("a", "b"), 3)
    assert spec.owner == "ann@shop.example"
    assert (spec.misfire, spec.catchup_window_seconds, spec.starts_paused) == (MisfirePolicy.ALL, 7200.0, True)
    assert spec.run_timeout_seconds == 3600.0
    assert [param.name for param in spec.params] == ["n", "plain"]
    (schedule,) = spec.schedules
    assert (schedule.name, schedule.spec.timezone, spec.timezone) == ("default", "Europe/Berlin", "Europe/Berlin")
    assert schedule.spec.start_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert schedule.spec.end_at == datetime(2031, 1, 1, tzinfo=UTC)


def test_a_dag_may_wait_for_other_work_and_update_assets() -> None:
    @task(outlets=[Asset("orders"), "rates"])
    def load() -> None: ...

    @dag(schedule=after("shop", Asset("rates")), timezone="Europe/Berlin", start_at="2030-01-01")
    def sample() -> None:
        load()

    spec = sample().spec
    assert spec.tasks[0].outlets == ("orders", "rates")
    (schedule,) = spec.schedules
    assert describe(schedule.spec) == "after shop and asset rates"
    assert from_json(to_json(spec)) == spec


def test_a_schedule_may_have_rules_of_its_own_or_the_dags() -> None:
    @dag(
        schedules={
            "listed": [datetime(2030, 1, 2, tzinfo=UTC), "2030-01-01"],
            "own": {
                "schedule": "@every 90m",
                "anchor_at": "2030-01-01T00:20:00Z",
                "jitter": "5m",
                "misfire": "all",
                "catchup_window": "2d",
                "catchup_limit": 7,
                "overlap": "queue_one",
            },
        },
        overlap="skip",
        jitter=30,
    )
    def sample() -> None:
        extract()

    spec = sample().spec
    listed, own = spec.schedules
    assert listed.spec.times == (datetime(2030, 1, 1, tzinfo=UTC), datetime(2030, 1, 2, tzinfo=UTC))
    assert (listed.overlap, spec.overlap, listed.spec.jitter_seconds) == (None, "skip", 30)
    assert own.spec.anchor_at == datetime(2030, 1, 1, 0, 20, tzinfo=UTC)
    assert (own.misfire, own.catchup_window_seconds, own.catchup_limit, own.overlap) == ("all", 172_800, 7, "queue_one")
    assert own.spec.jitter_seconds == 300
    assert from_json(to_json(spec)) == spec


def test_a_dag_may_have_several_schedules_with_their_own_params() -> None:
    @dag(
        params={"full": False},
        timezone="Europe/Berlin",
        schedules={
            "weekly": {"schedule": "@weekly", "params": {"full": True}, "timezone": "UTC"},
            "hourly": "@hourly",
            "often": timedelta(seconds=30),
        },
    )
    def sample() -> None:
        extract()

    schedules = sample().spec.schedules
    assert [(each.name, each.spec.timezone, dict(each.params)) for each in schedules] == [
        ("hourly", "Europe/Berlin", {}),
        ("often", "Europe/Berlin", {}),
        ("weekly", "UTC", {"full": True}),
    ]


def test_the_docstring_describes_the_dag() -> None:
    @dag
    def sample() -> None:
        """What it is for."""
        extract()

    assert sample().spec.description == "What it is for."


def test_compiling_is_linear_in_the_calls() -> None:
    """Ten thousand take half a second of a processor; how long that is on a slower one is no matter of ours."""

    def seconds(loads: int) -> float:
        started = time.process_time()
        compiled = built(lambda: load([load(extract()) for _ in range(loads)]))
        assert len(compiled.spec.tasks) == 2 * loads + 1
        return time.process_time() - started

    small = min(seconds(500) for _ in range(3))
    large = min(seconds(5_000) for _ in range(2))
    assert large / small <= 20, f"{large:.3f} s for 10,000 calls, {small:.3f} s for 1,000"


# --- refusals: each with file and line ---


def refusal(wrong: Callable[[], object]) -> str:
    with pytest.raises(InvalidDag) as caught:
        wrong()
    assert caught.value.file == __file__
    assert caught.value.line is not None
    return caught.value.message


def in_dag(wrong: Callable[[], object]) -> str:
    return refusal(lambda: built(wrong))


def test_calling_a_task_outside_a_dag_explains_what_to_do() -> None:
    message = refusal(lambda: extract())
    assert "'extract' was used outside a DAG" in message
    assert "extract.function(...)" in message
    assert "outside a DAG" in refusal(lambda: shell("ls"))
    assert "outside a DAG" in refusal(lambda: task_group("g").__enter__())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"retris": 1}, "no option 'retris'; did you mean 'retries'?"),
        ({"retries": "3"}, "retries is '3', but it must be a whole number"),
        ({"retries": -1}, "retries is -1, but it must be 0 or more"),
        ({"retries": True}, "retries is True"),
        ({"retry_delay": -5}, "retry_delay is -5"),
        ({"retry_delay": "soon"}, "retry_delay is 'soon'"),
        ({"retry_backoff": "exponentail"}, "did you mean 'exponential'?"),
        ({"retry_jitter": 2}, "from 0 to 1"),
        ({"retry_delay": "2h", "retry_backoff": "linear"}, "retry_max_delay is 3600, less than retry_delay 7200"),
        ({"timeout": [5]}, "timeout is [5], but it must be seconds"),
        ({"queue": 3}, "queue is 3, but it must be text"),
        ({"priority": 1.5}, "priority is 1.5"),
        ({"trigger_rule": "all_sucess"}, "did you mean 'all_success'?"),
        ({"isolation": "vm"}, "one of process, warm"),
        ({"rerun_on_loss": "no"}, "True or False"),
        ({"on_lost_contact": "panic"}, "one of continue, stop"),
    ],
)
def test_a_wrong_task_option_is_refused_where_it_is_written(options: dict[str, Any], expected: str) -> None:
    assert expected in refusal(lambda: task(**options)(extract.function))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shedule": "@daily"}, "no option 'shedule'; did you mean 'schedule'?"),
        ({"schedule": "61 * * * *"}, "61"),
        ({"schedule": "@daily", "schedules": {}}, "not both"),
        ({"schedules": ["@daily"]}, "must be a dict of"),
        ({"schedules": {"x": {"schedule": "@daily", "parms": {}}}}, "did you mean 'params'?"),
        ({"timezone": "Europe/Berln"}, "Europe/Berlin"),
        ({"tags": "one"}, "tags is 'one'"),
        ({"owner": 3}, "owner is 3"),
        ({"tags": [1]}, "it must be text"),
        ({"params": {"when": datetime(2030, 1, 1, tzinfo=UTC)}}, "param 'when'"),
        ({"params": ["a"]}, "must be a dict"),
        ({"max_active_runs": "3"}, "whole number"),
        ({"run_timeout": "soon"}, "run_timeout is 'soon'"),
        ({"run_timeout": -1}, "0 or more"),
        ({"misfire": "never"}, "one of skip, latest, all"),
        ({"catchup_window": -1}, "0 or more"),
        ({"paused": "yes"}, "True or False"),
        ({"task_defaults": {"retrys": 1}}, "did you mean 'retries'?"),
        ({"task_defaults": {"name": "x"}}, "without a name"),
        ({"start_at": "tomorrow", "schedule": "@daily"}, "start_at"),
        ({"schedule": "0 0 31 2 *"}, "never fires"),
        ({"schedules": {"x": {"schedule": after("y"), "jitter": "5m"}}}, "cannot have jitter_seconds"),
        ({"schedule": "@daily", "start_at": "2031-01-01", "end_at": "2030-01-01"}, "before it starts"),
        ({"schedule": "@daily", "timezone": "Europe/Berln"}, "did you mean 'Europe/Berlin'?"),
        ({"schedule": []}, "a list of 0 times"),
        ({"schedule": ["2030-01-01", "soon"]}, "times[1] 'soon' is not a date and time"),
        ({"schedule": "@daily", "jitter": "often"}, "schedule 'default'"),
        ({"schedule": "@daily", "jitter": "2d"}, "between 0 s and one day"),
        ({"schedule": "@daily", "anchor_at": "2030-01-01"}, "cannot have anchor_at"),
        ({"schedule": "@daily", "overlap": "skp"}, "did you mean 'skip'?"),
        ({"schedule": "@daily", "catchup_limit": 0}, "catchup_limit is 0, but it must be from 1 to 1,000"),
        ({"schedules": {"x": {"schedule": "@daily", "misfire": "sum"}}}, "schedule 'x': it must be one of"),
    ],
)
def test_a_wrong_dag_option_is_refused_where_it_is_written(options: dict[str, Any], expected: str) -> None:
    assert expected in refusal(lambda: dag(**options)(lambda: extract()))


def test_a_cycle_is_refused_at_the_dag_with_its_path() -> None:
    def body() -> None:
        a, b = extract.override(name="a")(), extract.override(name="b")()
        a >> b >> a

    assert "a >> b >> a" in in_dag(body)


def test_an_empty_dag_is_refused() -> None:
    assert "no tasks" in in_dag(lambda: None)


def test_tasks_of_two_dags_cannot_be_connected() -> None:
    kept: list[Any] = []
    dag(name="first")(lambda: kept.append(extract()))()
    message = in_dag(lambda: kept[0] >> load())
    assert "'extract' belongs to DAG 'first'" in message
    assert "belongs to DAG 'first'" in in_dag(lambda: load(kept[0]))


def test_a_dag_cannot_be_called_within_a_dag() -> None:
    inner = dag(name="inner")(lambda: extract())
    assert "'inner' was called inside DAG 'sample'" in in_dag(inner)


def test_a_dag_can_be_called_after_a_failed_one() -> None:
    def broken() -> None:
        extract()
        raise RuntimeError("in the body")

    with pytest.raises(RuntimeError):
        built(broken)
    assert built(extract).name == "sample"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda: extract >> load, "'extract' must be called before"),
        (lambda: extract() >> load, "<task load> cannot be an operand of >> or <<: call the task first"),
        (lambda: extract() >> "load", "'load' cannot be an operand of"),
        (lambda: chain(extract(), load), "<task load> cannot be an operand of"),
        (lambda: chain([extract()], [extract()]), "two lists follow each other"),
        (lambda: extract("a", "b"), "wrong arguments for task 'extract'"),
        (lambda: extract(tabel="x"), "unexpected keyword argument 'tabel'"),
        (lambda: load(extract), "<task extract> cannot be passed"),
        (lambda: load({extract()}), "a set cannot contain results"),
        (lambda: load(OrderedDict(rows=extract())), "a OrderedDict cannot contain results"),
        (lambda: extract.override(name="a.b")(), "'a.b' is not a valid name for a task"),
        (lambda: extract.override(name="")(), "'' is not a valid name for a task"),
        (lambda: (shell("x", "ls"), shell("x", "ls")), "already has a task or group 'x'"),
        (lambda: shell("x", " "), "needs a command"),
        (lambda: shell("x", "ls", env={"A=B": 1}), "'A=B', which is not an allowed name"),
        (lambda: shell("x", "ls", env=["A"]), "env must be a dict"),  # type: ignore[call-overload]
        (lambda: shell("x", "ls", retris=1), "did you mean 'retries'?"),  # type: ignore[call-overload]
    ],
)
def test_wrong_use_in_a_dag_is_refused(wrong: Callable[[], object], expected: str) -> None:
    assert expected in in_dag(wrong)


def test_wrong_use_of_groups_is_refused() -> None:
    def open_group() -> None:
        with task_group("g") as group:
            extract()
            group >> load()

    def empty_group() -> None:
        with task_group("g") as group:
            pass
        group >> load()

    def twice() -> None:
        for _ in range(2):
            with task_group("g"):
                extract()

    def entered_again() -> None:
        group = task_group("g")
        with group:
            extract()
        with group:
            extract()

    assert "only after its `with` block" in in_dag(open_group)
    assert "has no tasks" in in_dag(empty_group)
    assert "already has a task or group 'g'" in in_dag(twice)
    assert "was already entered" in in_dag(entered_again)


def test_functions_that_yield_cannot_be_tasks() -> None:
    def stream() -> Any:
        yield 1

    async def later() -> None: ...

    assert "is a generator" in refusal(lambda: task(stream))
    assert "must be a plain function" in refusal(lambda: dag(stream))
    assert "must be a plain function" in refusal(lambda: dag(later))


def test_decorators_without_a_function_are_refused() -> None:
    assert "options need names" in refusal(lambda: task("extract"))  # type: ignore[call-overload]
    assert "options need names" in refusal(lambda: dag("etl"))  # type: ignore[call-overload]


def test_a_dag_cannot_wait_for_itself() -> None:
    def build() -> object:
        return dag(name="own", schedule=after(any_of("other", "own")))(lambda: extract())()

    assert "waits for its own DAG" in refusal(build)


@pytest.mark.parametrize("outlets", ["orders", [3], [""], [finished("x")]])
def test_outlets_are_names_of_assets(outlets: object) -> None:
    assert "outlets is" in refusal(lambda: task(outlets=outlets)(lambda: None))  # type: ignore[call-overload]
