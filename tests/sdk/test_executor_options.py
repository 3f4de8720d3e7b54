"""`executor_options` of DAGs and tasks: what is stored with the spec, what holds for a task, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from evertick import dag, shell, task
from evertick.domain.dags.spec import TaskSpec, from_json, structural_hash, to_json
from evertick.domain.errors import InvalidDag
from evertick.domain.executor_options import MOST_BYTES, place_of
from evertick.sdk.runtime import CompiledDag


def built(body: Callable[[], object], **options: object) -> CompiledDag:
    return dag(name="sample", **options)(body)()  # type: ignore[arg-type, call-overload, no-any-return]


def only(compiled: CompiledDag) -> TaskSpec:
    (spec,) = compiled.spec.tasks
    return spec


def test_options_of_dag_and_task_are_stored_with_the_spec_and_joined() -> None:
    @task(executor_options={"kubernetes": {"image": "etl:7", "resources": {"limits": {"memory": "2Gi"}}}})
    def work() -> None: ...

    shared = {"kubernetes": {"image": "etl:6", "resources": {"requests": {"cpu": "1"}}, "env": {"REGION": "eu"}}}
    compiled = built(work, executor_options=shared)
    again = from_json(to_json(compiled.spec))
    assert again == compiled.spec
    assert structural_hash(again) == structural_hash(compiled.spec)
    assert place_of(again.executor_options, again.tasks[0].executor_options) == {
        "kubernetes": {
            "image": "etl:7",
            "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
            "env": {"REGION": "eu"},
        }
    }


def test_a_dag_without_them_is_as_it_was() -> None:
    assert "executor_options" not in to_json(built(lambda: shell("a", "true")).spec)


def test_a_default_of_all_tasks_is_replaced_by_a_task_s_own() -> None:
    def body() -> None:
        shell("a", "true")
        shell("b", "true", executor_options={"kubernetes": {"image": "b:1"}})

    compiled = built(body, task_defaults={"executor_options": {"kubernetes": {"image": "a:1"}}})
    found = {spec.name: spec.executor_options for spec in compiled.spec.tasks}
    assert found == {"a": {"kubernetes": {"image": "a:1"}}, "b": {"kubernetes": {"image": "b:1"}}}


def test_what_is_another_executor_s_is_stored_as_it_is() -> None:
    compiled = built(lambda: shell("a", "true", executor_options={"mine:factory": {"anything": [1, None]}}))
    assert only(compiled).executor_options == {"mine:factory": {"anything": [1, None]}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kubernetes": {"imge": "a"}}, "did you mean 'image'?"),
        ({"kubernetes": "a"}, "must be a dict"),
        (["kubernetes"], "it must be a dict keyed by executor"),
        ({"kubernetes": {"image": "two words"}}, "the name of an image"),
        ({"kubernetes": {"image_pull_policy": "Sometimes"}}, "Always, IfNotPresent or Never"),
        ({"kubernetes": {"resources": {"limits": {"memory": "lots"}}}}, "write it as '500m' or '2Gi'"),
        ({"kubernetes": {"resources": {"limit": {}}}}, "it must be a dict"),
        ({"kubernetes": {"resources": {"limits": "1Gi"}}}, "it must be a dict"),
        ({"kubernetes": {"env": {"EVERTICK_SERVER": "http://evil"}}}, "no name reserved by Evertick"),
        ({"kubernetes": {"env": {"A": 1}}}, "a dict of texts"),
        ({"kubernetes": {"env_secrets": "db"}}, "a list of names of Secrets"),
        ({"kubernetes": {"env_config_maps": ["A b"]}}, "is not a valid name"),
        ({"kubernetes": {"image_pull_secrets": [3]}}, "is not a valid name"),
        ({"kubernetes": {"volumes": [{"emptyDir": {}}]}}, "a list of dicts"),
        ({"kubernetes": {"volume_mounts": [{"name": "a"}]}}, "mountPath"),
        ({"kubernetes": {"tolerations": {"key": "gpu"}}}, "a list of dicts"),
        ({"kubernetes": {"node_selector": {"disk": "s s d"}}}, "is not a valid label"),
        ({"kubernetes": {"labels": {"evertick.io/owner": "me"}}}, "is not a valid key"),
        ({"kubernetes": {"annotations": {"a": 1}}}, "a dict of texts"),
        ({"kubernetes": {"service_account": "Not Valid"}}, "name of a service account"),
        ({"kubernetes": {"priority_class": 7}}, "name of a priority class"),
        ({"kubernetes": {"pod": {"status": {}}}}, "a part of a manifest"),
        ({"kubernetes": {"pod": {"spec": []}}}, "must be dicts"),
        ({"kubernetes": {"pod": {"metadata": {"labels": ["a"]}}}}, "a dict of texts"),
        ({"kubernetes": {"pod": {"spec": {"x": {1, 2}}}}}, "texts, numbers"),
        ({"other": {"x": "y" * MOST_BYTES}}, "at most 16,384 bytes"),
        ({"other": {"x": "\0"}}, "without NUL"),
        ({"other": {"x": "\ud800"}}, "valid text"),
    ],
)
def test_what_is_wrong_is_refused_where_it_is_written(options: Mapping[str, object], says: str) -> None:
    with pytest.raises(InvalidDag, match="executor_options") as of_task:
        built(lambda: shell("a", "true", executor_options=options))
    assert says in str(of_task.value)
    with pytest.raises(InvalidDag, match="executor_options") as of_dag:
        built(lambda: shell("a", "true"), executor_options=options)
    assert says in str(of_dag.value)


def test_lists_of_a_task_are_added_to_those_of_its_dag_and_replace_what_has_the_same_name() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "reference"}}
    below: Any = {
        "tolerations": [{"key": "batch"}],
        "env_secrets": ["warehouse"],
        "image_pull_secrets": ["registry"],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "reference", **claim}],
        "volume_mounts": [{"name": "data", "mountPath": "/data"}],
        "node_selector": {"pool": "batch"},
        "pod": {"spec": {"hostNetwork": False, "tolerations": [{"key": "a"}]}},
        "image": "etl:7",
    }
    above: Any = {
        "tolerations": [{"key": "gpu"}, {"key": "batch"}],
        "env_secrets": ["lake"],
        "image_pull_secrets": ["registry"],
        "volumes": [{"name": "data", "hostPath": {"path": "/x"}}],
        "volume_mounts": [{"name": "reference", "mountPath": "/reference"}],
        "node_selector": {"disk": "ssd"},
        "pod": {"spec": {"tolerations": [{"key": "b"}]}},
        "image": "ml:3",
    }
    assert place_of({"kubernetes": below}, {"kubernetes": above})["kubernetes"] == {
        "tolerations": [{"key": "batch"}, {"key": "gpu"}],
        "env_secrets": ["warehouse", "lake"],
        "image_pull_secrets": ["registry"],
        "volumes": [{"name": "data", "hostPath": {"path": "/x"}}, {"name": "reference", **claim}],
        "volume_mounts": [{"name": "data", "mountPath": "/data"}, {"name": "reference", "mountPath": "/reference"}],
        "node_selector": {"pool": "batch", "disk": "ssd"},
        "pod": {"spec": {"hostNetwork": False, "tolerations": [{"key": "a"}, {"key": "b"}]}},
        "image": "ml:3",
    }
    # What an executor of somebody else's means by a list is not known here.
    assert place_of({"own": {"zones": ["a"]}}, {"own": {"zones": ["b"]}}) == {"own": {"zones": ["b"]}}
