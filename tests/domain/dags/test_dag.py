"""The published form of a DAG: canonical text, one hash per meaning, and every refusal by name."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from evertick.domain.attempt import Isolation
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import (
    DagSpec,
    DatabaseOutagePolicy,
    NamedSchedule,
    TaskKind,
    TaskSpec,
    from_json,
    structural_hash,
    to_json,
)
from evertick.domain.dags.validation import MAX_TASKS, arrange, validate
from evertick.domain.errors import InvalidDag
from evertick.domain.retry import Backoff, RetryPolicy
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.domain.states import TriggerRule


def dag_of(*arrows: str, **fields: object) -> DagSpec:
    """`dag_of("a >> b", "c")`: tasks in order of appearance, an edge per arrow."""
    names: dict[str, int] = {}
    edges = []
    for chain in arrows:
        steps = [names.setdefault(name.strip(), len(names)) for name in chain.split(">>")]
        edges += list(pairwise(steps))
    tasks = tuple(TaskSpec(name=name, group=name.rpartition(".")[0] or None) for name in names)
    return replace(DagSpec(name="sample", tasks=tasks, edges=tuple(edges)), **fields)  # type: ignore[arg-type]


FULL = DagSpec(
    name="full",
    description="everything set",
    owner="ann",
    tags=("a", "ü"),
    params=declare_params({"n": Param(3, minimum=1, maximum=9), "mode": Param("x", choices=["x", "y"]), "any": None}),
    schedules=(
        NamedSchedule(name="nightly", spec=parse_schedule("0 2 * * *", timezone="Europe/Berlin"), params={"n": 5}),
        NamedSchedule(name="once", spec=parse_schedule(datetime(2030, 1, 1, tzinfo=UTC))),
        NamedSchedule(name="quick", spec=parse_schedule("@every 250ms")),
    ),
    tasks=(
        TaskSpec(name="first", is_setup=True, timeout_seconds=2.5, isolation=Isolation.WARM, doc="Does it."),
        TaskSpec(name="g.sh", group="g", kind=TaskKind.SHELL, command="echo $A", queue="big", priority=9),
        TaskSpec(
            name="last",
            trigger_rule=TriggerRule.ONE_SUCCESS,
            retry=RetryPolicy(retries=3, delay_seconds=1.5, backoff=Backoff.LINEAR, max_delay_seconds=None, jitter=0.5),
            rerun_on_loss=False,
            on_lost_contact=DatabaseOutagePolicy.STOP,
            is_async=True,
            inputs=("first",),
        ),
    ),
    edges=((0, 1), (0, 2), (1, 2)),
    timezone="Europe/Berlin",
    max_active_runs=2,
    misfire=MisfirePolicy.ALL,
    catchup_window_seconds=60.0,
    starts_paused=True,
)


def test_a_spec_comes_back_from_its_text_unchanged() -> None:
    validate(FULL)
    assert from_json(to_json(FULL)) == FULL


def test_a_spec_survives_a_json_store_that_reorders_keys() -> None:
    stored = json.loads(to_json(FULL))
    shuffled = dict(reversed(stored.items()))
    assert from_json(json.dumps(shuffled, indent=2)) == FULL


def test_the_text_is_canonical() -> None:
    text = to_json(FULL)
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_the_text_leaves_out_defaults_so_that_new_fields_change_no_hash() -> None:
    assert to_json(dag_of("a >> b")) == '{"edges":[[0,1]],"name":"sample","tasks":[{"name":"a"},{"name":"b"}]}'


def test_the_hash_does_not_depend_on_the_order_of_declaration() -> None:
    one = arrange(dag_of("a >> c", "b >> c", "d", tags=("x", "y")))
    other = arrange(dag_of("d", "b >> c", "a >> c", tags=("y", "x")))
    assert one != other
    assert structural_hash(one) == structural_hash(other)


@pytest.mark.parametrize(
    "changed",
    [
        dag_of("a >> c", "b"),
        dag_of("a >> b", "c", description="other"),
        dag_of("a >> b", "c", tags=("t",)),
        dag_of("a >> b", "c", schedules=(NamedSchedule(name="s", spec=parse_schedule("@daily")),)),
        dag_of("a >> b", "d"),
        dag_of("b >> a", "c"),
    ],
)
def test_the_hash_changes_with_the_meaning(changed: DagSpec) -> None:
    assert structural_hash(changed) != structural_hash(dag_of("a >> b", "c"))


def test_a_thousand_shuffled_declarations_have_one_hash() -> None:
    hashes = set()
    for seed in range(1_000):
        rng = random.Random(seed)
        chains = ["a >> b >> d", "a >> c >> d", "g.x >> g.y", "e"]
        rng.shuffle(chains)
        hashes.add(structural_hash(arrange(dag_of(*chains))))
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"name":1}', '{"name":"x","tasks":[{}]}', '{"name":"x","odd":1}']
)
def test_text_that_is_no_dag_is_refused(text: str) -> None:
    with pytest.raises(InvalidDag, match="this release cannot read the published DAG"):
        from_json(text)


@pytest.mark.requirement("N33")
def test_a_dag_that_uses_nothing_new_is_written_as_older_releases_can_read_it() -> None:
    """What a later release adds has a default, and a default is not written. What it uses of it, an older one refuses to guess."""
    written = to_json(dag_of("a"))
    needed = {field.name for field in fields(DagSpec) if field.default is field.default_factory is MISSING}
    assert set(json.loads(written)) == needed
    later = json.dumps({**json.loads(written), "later": True})
    with pytest.raises(InvalidDag, match=r"'later'.*If a later release published it, upgrade Evertick here"):
        from_json(later)


# --- order ---


def test_tasks_stand_by_level_and_then_by_declaration() -> None:
    arranged = arrange(dag_of("late >> end", "b >> late", "a >> end", "b >> end", "solo"))
    assert [task.name for task in arranged.tasks] == ["b", "a", "solo", "late", "end"]
    assert arranged.edges == ((0, 3), (0, 4), (1, 4), (3, 4))


def test_every_edge_of_an_arranged_dag_goes_forward() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randint(1, 30)
        order = rng.sample(range(size), size)
        edges = {(order[i], order[j]) for i in range(size) for j in range(i + 1, size) if rng.random() < 0.1}
        spec = DagSpec(name="r", tasks=tuple(TaskSpec(name=f"t{i}") for i in range(size)), edges=tuple(edges))
        validate(spec)
        arranged = arrange(spec)
        assert all(up < down for up, down in arranged.edges)
        assert named_edges(arranged) == named_edges(spec)


def named_edges(spec: DagSpec) -> set[tuple[str, str]]:
    return {(spec.tasks[up].name, spec.tasks[down].name) for up, down in spec.edges}


def compile_seconds(size: int) -> float:
    """Processor time to check, write, read and hash a fan-out and fan-in of that many tasks."""
    tasks = tuple(TaskSpec(name=f"t{i}") for i in range(size))
    edges = [(0, i) for i in range(1, size - 1)] + [(i, size - 1) for i in range(1, size - 1)]
    spec = DagSpec(name="wide", tasks=tasks, edges=tuple(edges))
    started = time.process_time()
    validate(spec)
    structural_hash(from_json(to_json(arrange(spec))))
    return time.process_time() - started


def test_compiling_is_linear_in_the_tasks() -> None:
    small = min(compile_seconds(1_000) for _ in range(3))
    large = min(compile_seconds(10_000) for _ in range(3))
    assert large / small <= 20, f"{large:.3f} s for 10,000 tasks, {small:.3f} s for 1,000"


def test_a_chain_of_ten_thousand_needs_no_recursion() -> None:
    spec = DagSpec(
        name="deep",
        tasks=tuple(TaskSpec(name=f"t{i}") for i in range(10_000)),
        edges=tuple((i, i + 1) for i in reversed(range(9_999))),
    )
    validate(spec)
    assert [task.name for task in arrange(spec).tasks[:3]] == ["t0", "t1", "t2"]


# --- refusals ---


def refusal(spec: DagSpec) -> str:
    with pytest.raises(InvalidDag) as caught:
        validate(spec)
    return str(caught.value)


def test_a_cycle_is_shown_as_a_path() -> None:
    assert "cycle: a >> b >> c >> a." in refusal(dag_of("start >> a >> b >> c >> a", "c >> end"))
    assert "cycle: a >> a." in refusal(dag_of("a >> a"))
    assert "cycle: a >> b >> a." in refusal(dag_of("a >> b >> a", "b >> far >> further"))


def test_a_long_cycle_is_shown_shortened() -> None:
    loop = " >> ".join([f"t{i}" for i in range(5_000)] + ["t0"])
    message = refusal(dag_of(loop))
    assert "t0 >> t1 >> " in message
    assert message.endswith(">> ... >> t0. Remove one of these dependencies.")


def test_duplicate_names_are_named() -> None:
    twice = DagSpec(name="d", tasks=tuple(TaskSpec(name=name) for name in ("a", "b", "a", "b", "c")))
    assert "used twice: a, b" in refusal(twice)


def test_unknown_upstream_tasks_are_named() -> None:
    lonely = DagSpec(name="d", tasks=(TaskSpec(name="a", inputs=("ghost",)), TaskSpec(name="b", inputs=("a",))))
    message = refusal(lonely)
    assert "'a' takes the result of unknown tasks: ghost" in message
    assert "'b' takes the result of tasks that are not upstream of it: a" in message
    assert "7 >> 0" in refusal(DagSpec(name="d", tasks=(TaskSpec(name="a"),), edges=((7, 0),)))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "a\n", "a" * 201, "../x"])
def test_names_outside_the_alphabet_or_too_long_are_refused(name: str) -> None:
    assert "not allowed" in refusal(replace(dag_of("a"), name=name))
    assert "not allowed" in refusal(DagSpec(name="d", tasks=(TaskSpec(name=name),)))


def test_a_name_of_200_characters_is_allowed() -> None:
    validate(DagSpec(name="a" * 200, tasks=(TaskSpec(name="b" * 200),)))


def test_an_empty_dag_is_refused() -> None:
    assert "has no tasks" in refusal(DagSpec(name="d", tasks=()))


def test_too_many_tasks_are_refused() -> None:
    spec = DagSpec(name="d", tasks=(TaskSpec(name="a"),) * (MAX_TASKS + 1))
    assert "at most 100,000" in refusal(spec)


def test_tags_have_limits() -> None:
    assert "at most 50" in refusal(dag_of("a", tags=tuple(f"t{i}" for i in range(51))))
    assert "owner ' ' must be 1 to" in refusal(dag_of("a", owner=" "))
    for tag in ("", "x" * 101, "a\nb", 3):
        assert "tag " in refusal(dag_of("a", tags=(tag,)))


def changed_task(**fields: object) -> DagSpec:
    return DagSpec(name="d", tasks=(replace(TaskSpec(name="a"), **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"priority": 10}, "priority is 10"),
        ({"priority": -1}, "priority is -1"),
        ({"priority": True}, "priority is True"),
        ({"priority": "5"}, "'a'.priority"),
        ({"timeout_seconds": 0}, "timeout is 0"),
        ({"queue_timeout_seconds": 0}, "queue_timeout is 0"),
        ({"queue_timeout_seconds": 1e12}, "at most ten years"),
        ({"queue_timeout_seconds": "1h"}, "'a'.queue_timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout is nan"),
        ({"timeout_seconds": "1h"}, "'a'.timeout_seconds"),
        ({"queue": "two words"}, "queue 'two words'"),
        ({"queue": 5}, "'a'.queue"),
        ({"command": "ls"}, "only a shell task"),
        ({"kind": TaskKind.SHELL}, "needs a command"),
        ({"doc": "nul \0"}, "without NUL"),
        ({"doc": "half \ud800"}, "valid text"),
        ({"group": "g"}, "name of their group: a"),
        ({"rerun_on_loss": 1}, "'a'.rerun_on_loss"),
    ],
)
def test_a_task_with_a_bad_field_is_named(fields: dict[str, object], expected: str) -> None:
    assert expected in refusal(changed_task(**fields))


def test_a_name_cannot_be_both_a_task_and_a_group() -> None:
    tasks = (TaskSpec(name="g"), TaskSpec(name="g.h.x", group="g.h"))
    assert "for both a task and a group: g;" in refusal(DagSpec(name="d", tasks=tasks))


@pytest.mark.parametrize("limit", [0, -1, True, "3", float("inf"), float("nan"), 1e12])
def test_a_run_timeout_must_be_a_time_that_ends(limit: object) -> None:
    assert "run_timeout" in refusal(dag_of("a", run_timeout_seconds=limit))


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, "3"])
def test_max_active_runs_must_be_a_positive_number(limit: object) -> None:
    assert "max_active_runs" in refusal(dag_of("a", max_active_runs=limit))


def test_a_schedule_must_be_able_to_start_a_run() -> None:
    params = declare_params({"region": Param(type=str, required=True), "n": 3})
    schedule = NamedSchedule(name="hourly", spec=parse_schedule("@hourly"))
    assert "schedule 'hourly' cannot start a run: param 'region' is required" in refusal(
        dag_of("a", params=params, schedules=(schedule,))
    )
    validate(dag_of("a", params=params, schedules=(replace(schedule, params={"region": "eu"}),)))


def test_schedule_names_are_checked() -> None:
    spec = parse_schedule("@hourly")
    both: Iterable[NamedSchedule] = (NamedSchedule(name="x", spec=spec), NamedSchedule(name="x", spec=spec))
    assert "schedule names are used twice: x" in refusal(dag_of("a", schedules=tuple(both)))
    assert "schedule names are not allowed" in refusal(dag_of("a", schedules=(NamedSchedule(name="a b", spec=spec),)))
