"""Pools, keys and limits as a DAG file writes them, and what is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evertick import dag, shell, task, task_group
from evertick.authoring.resolve import Dag
from evertick.domain.dag import DagSpec, OnLostContact, TaskSpec, from_json, structural_hash, to_json
from evertick.domain.errors import InvalidDag
from evertick.domain.gates import EXCLUSIVE, GateKind, GateSpec, key_parts
from evertick.engine.publish import dag_row


def built(body: Callable[[], object], **options: object) -> Dag:
    return dag(name="sample", params={"table": "t"}, **options)(body)()  # type: ignore[arg-type, call-overload, no-any-return]


def only(compiled: Dag) -> TaskSpec:
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
    assert only(built(lambda: shell("x", "true", mutex="k"))).on_lost_contact is OnLostContact.STOP
    assert only(built(lambda: shell("x", "true", pool="db"))).on_lost_contact is OnLostContact.CONTINUE
    spec = only(built(lambda: shell("x", "true", mutex="k", on_lost_contact="continue")))
    assert spec.on_lost_contact is OnLostContact.CONTINUE


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
        ({"pool": "a b"}, "a pool's name has letters"),
        ({"pool": {"db": 0}}, "whole numbers from 1"),
        ({"pool": {"db": -2}}, "whole numbers from 1"),
        ({"pool": 3}, "it must be a name, or a dict"),
        ({"mutex": "t:{params.tabel}"}, "declares no parameter 'tabel'"),
        ({"mutex": "t:{table}"}, "write {params.NAME}"),
        ({"mutex": "t:{params.table!r}"}, "write {params.NAME}"),
        ({"mutex": "t:{params.table"}, "expected '}'"),
        ({"mutex": ""}, "a text of 1 to 200 characters"),
        ({"mutex": {"a": 1}}, "it must be a key or a list of keys"),
        ({"parallel": {"k": 0}}, "whole numbers from 1"),
        ({"parallel": "k"}, "it must be a dict from keys to limits"),
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
    with pytest.raises(InvalidDag, match="max_active_tasks is 0"):
        built(lambda: shell("x", "true"), max_active_tasks=0)
    with pytest.raises(InvalidDag, match="at most 20"):
        built(lambda: shell("x", "true", mutex=[f"k{i}" for i in range(21)]))
