"""Pools, keys and limits as a DAG file writes them, and what is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evertick import dag, shell, task, task_group
from evertick.domain.dags.gates import EXCLUSIVE, GateKind, GateSpec, key_parts
from evertick.domain.dags.spec import DagSpec, DatabaseOutagePolicy, TaskSpec, from_json, structural_hash, to_json
from evertick.domain.errors import InvalidDag
from evertick.engine.publish import dag_row
from evertick.sdk.runtime import CompiledDag


def built(body: Callable[[], object], **options: object) -> CompiledDag:
    return dag(name="sample", params={"table": "t"}, **options)(body)()  # type: ignore[arg-type, call-overload, no-any-return]


def only(compiled: CompiledDag) -> TaskSpec:
    (spec,) = compiled.spec.tasks
    return spec


def test_every_option_becomes_a_gate() -> None:
    @task(
        pool={"db": 2, "api": 1}, mutex="t:{params.table}", mutex_shared=["a", "b"], parallel={"host": 5}, max_active=3
    )
    def work() -> None: ...

    spec = only(built(work))
    assert set(spec.gates) == {
        GateSpec(kind=GateKind.POOL, name="db", weight=2),
        GateSpec(kind=GateKind.POOL, name="api"),
        GateSpec(kind=GateKind.MUTEX, name="t:{params.table}", weight=EXCLUSIVE),
        GateSpec(kind=GateKind.MUTEX, name="a"),
        GateSpec(kind=GateKind.MUTEX, name="b"),
        GateSpec(kind=GateKind.KEY, name="host", capacity=5),
        GateSpec(kind=GateKind.TASK, name="", capacity=3),
    }
    assert only(built(lambda: shell("x", "true", pool="db"))).gates == (GateSpec(kind=GateKind.POOL, name="db"),)


def test_a_group_limits_each_of_its_tasks_and_a_dag_all_of_them() -> None:
    def body() -> None:
        with task_group("outer", max_active=4), task_group("inner", max_active=2):
            shell("x", "true")
        shell("y", "true")

    compiled = built(body, max_active_tasks=7)
    inner, outer = (GateSpec(kind=GateKind.GROUP, name=n, capacity=c) for n, c in (("outer.inner", 2), ("outer", 4)))
    assert set(compiled.spec.tasks[0].gates) == {inner, outer}
    row = dag_row(compiled.spec, file="f", bundle_hash="b")
    gates = [(each["idx"], each["kind"], each["name"], each["capacity"]) for each in row["gates"]]  # type: ignore[attr-defined]
    assert (1, "dag", "sample", 7) in gates and (0, "group", "outer", 4) in gates
    assert all(each["is_gated"] for each in row["tasks"])  # type: ignore[attr-defined]


def test_holders_of_a_key_stop_when_they_lose_contact_unless_told_otherwise() -> None:
    assert only(built(lambda: shell("x", "true", mutex="k"))).on_lost_contact is DatabaseOutagePolicy.STOP
    assert only(built(lambda: shell("x", "true", pool="db"))).on_lost_contact is DatabaseOutagePolicy.CONTINUE
    spec = only(built(lambda: shell("x", "true", mutex="k", on_lost_contact="continue")))
    assert spec.on_lost_contact is DatabaseOutagePolicy.CONTINUE


def test_a_default_for_all_tasks_can_be_taken_back() -> None:
    @task(pool=None)  # type: ignore[arg-type]
    def free() -> None: ...

    assert only(built(free, task_defaults={"pool": "db"})).gates == ()


def test_gates_survive_the_way_through_the_database() -> None:
    spec = built(lambda: shell("x", "true", mutex="t:{params.table}", parallel={"h": 2})).spec
    assert from_json(to_json(spec)) == spec
    assert isinstance(from_json(to_json(spec)), DagSpec)
    other = built(lambda: shell("x", "true", parallel={"h": 2}, mutex="t:{params.table}")).spec
    assert structural_hash(other) == structural_hash(spec)


def test_a_key_is_made_of_texts_and_parameters() -> None:
    assert key_parts("t:{params.a.b}/{{x}}") == ["t:", ["a", "b"], "/{", "x}"]
    assert key_parts("plain") == ["plain"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pool": "a b"}, "a pool name consists of letters"),
        ({"pool": {"db": 0}}, "whole numbers from 1"),
        ({"pool": {"db": -2}}, "whole numbers from 1"),
        ({"pool": 3}, "it must be a name, or a dict"),
        ({"mutex": "t:{params.tabel}"}, "declares no parameter 'tabel'"),
        ({"mutex": "t:{table}"}, "write {params.NAME}"),
        ({"mutex": "t:{params.table!r}"}, "write {params.NAME}"),
        ({"mutex": "t:{params.table"}, "expected '}'"),
        ({"mutex": ""}, "text of 1 to 200 characters"),
        ({"mutex": {"a": 1}}, "it must be a key or a list of keys"),
        ({"parallel": {"k": 0}}, "whole numbers from 1"),
        ({"parallel": "k"}, "it must be a dict of limits by key"),
        ({"max_active": 0}, "whole numbers from 1"),
        ({"max_active": "2"}, "it must be a whole number"),
    ],
)
def test_a_bad_gate_is_refused_with_the_reason(options: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidDag) as refusal:
        built(lambda: shell("x", "true", **options))  # type: ignore[arg-type]
    assert reason in str(refusal.value)


def test_bad_limits_of_groups_and_dags_are_refused() -> None:
    with pytest.raises(InvalidDag, match="max_active is 0"):
        task_group("g", max_active=0)
    for retries in (-1, 101, True, "2"):
        with pytest.raises(InvalidDag, match=r"retries is .*, but it must be (from 0 to 100|a whole number)"):
            task_group("g", retries=retries)  # type: ignore[arg-type]
    with pytest.raises(InvalidDag, match="max_active_tasks is 0"):
        built(lambda: shell("x", "true"), max_active_tasks=0)
    with pytest.raises(InvalidDag, match="at most 20"):
        built(lambda: shell("x", "true", mutex=[f"k{i}" for i in range(21)]))


def test_order_rate_and_past_become_gates() -> None:
    @task(order={"t:{params.table}": "{params.table}", "s": 7}, rate={"api": "10/1m"}, depends_on_past=True)
    def work() -> None: ...

    compiled = built(work)
    spec = only(compiled)
    assert set(spec.gates) == {
        GateSpec(kind=GateKind.ORDER, name="t:{params.table}", version="{params.table}"),
        GateSpec(kind=GateKind.ORDER, name="s", version=7),
        GateSpec(kind=GateKind.RATE, name="api", capacity=10, period_seconds=60.0),
        GateSpec(kind=GateKind.PAST, name=""),
    }
    assert spec.on_lost_contact is DatabaseOutagePolicy.STOP, "a smaller version must not run beside a larger one"
    assert from_json(to_json(compiled.spec)) == compiled.spec
    rows = dag_row(compiled.spec, file="f", bundle_hash="b")["gates"]
    assert {(each["kind"], str(each["version"]), each["period"]) for each in rows} == {  # type: ignore[attr-defined]
        ("order", "['table']", None),
        ("order", "7", None),
        ("rate", "None", 60.0),
        ("past", "None", None),
    }

    @task(depends_on_past=False, rate=None)  # type: ignore[arg-type]
    def free() -> None: ...

    assert only(built(free, task_defaults={"depends_on_past": True, "rate": {"api": "1/1s"}})).gates == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "k"}, "it must be a dict of versions by key"),
        ({"order": {"k": "7"}}, "is not a version: write a whole number, or one parameter"),
        ({"order": {"k": "{params.a}{params.b}"}}, "is not a version"),
        ({"order": {"k": 1.5}}, "is not a whole number of at most 64 bits"),
        ({"order": {"k": 2**63}}, "is not a whole number of at most 64 bits"),
        ({"order": {"k": None}}, "is not a whole number of at most 64 bits"),
        ({"order": {"": 1}}, "a key must be text of 1 to 200 characters"),
        ({"rate": "10/1m"}, "it must be a dict of rates by key"),
        ({"rate": {"k": "10"}}, "is not a rate: write a number per duration"),
        ({"rate": {"k": 10}}, "is not a rate"),
        ({"rate": {"k": "x/1m"}}, "is not a rate"),
        ({"rate": {"k": "0/1m"}}, "slots and limits are whole numbers from 1"),
        ({"rate": {"k": "5/0s"}}, "its period must be more than 0 and at most a year"),
        ({"rate": {"k": "5/2000d"}}, "its period must be more than 0 and at most a year"),
        ({"rate": {"k": "5/soon"}}, "soon"),
        ({"depends_on_past": "yes"}, "it must be True or False"),
    ],
)
def test_bad_orders_rates_and_pasts_are_refused_with_the_reason(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidDag) as refused:
        built(lambda: shell("x", "true", **options))  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_a_version_of_a_parameter_that_is_not_declared_is_refused() -> None:
    with pytest.raises(InvalidDag, match="declares no parameter 'seq'"):
        built(lambda: shell("x", "true", order={"k": "{params.seq}"}))


def test_a_schedule_whose_version_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidDag, match=r"schedule .*cannot start a run: task 'x': .*which is 't'"):
        built(lambda: shell("x", "true", order={"k": "{params.table}"}), schedule="@daily")
