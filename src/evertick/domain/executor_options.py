"""Options of a task for its executor: the short options of a pod, and the manifest parts that they expand to.

`pod` takes everything that has no short form, as a part of a manifest. Pure: only the cluster validates that part, at
submission.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from evertick.domain.dags.params import JsonValue
from evertick.domain.engine_options import ENGINE_OPTIONS, check_engine_options, check_image, environment_of
from evertick.domain.errors import UserError, did_you_mean

# The container in which the task runs; a pod may have others.
TASK_CONTAINER = "task"


Patch = dict[str, Any]


_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[mkunEe]|[eE][0-9]+)?")


_OURS = "evertick.io/"


def pod_patch(options: Mapping[str, object]) -> Patch:
    """The part of a manifest that these options expand to. The TypeError or ValueError names an invalid option."""
    patch: Patch = {}
    for name, value in options.items():
        if (write := _WRITERS.get(name)) is None:
            hint = did_you_mean(name, _WRITERS, f"known: {', '.join(_WRITERS)}")
            raise ValueError(f"a pod has no option {name!r}; {hint}")
        try:
            patch = merge(patch, write(value))
        except (TypeError, ValueError) as error:
            raise type(error)(f"its {name} is {value!r:.200}, where {error}") from None
    return patch


def join_pod_options(below: Mapping[str, Any], above: Mapping[str, Any]) -> Patch:
    """The options of a DAG, overridden by those of its task, merged like manifests."""
    found = dict(below)
    for name, value in above.items():
        under = found.get(name)
        if isinstance(under, list) and isinstance(value, list) and name in _MARKS:
            found[name] = _merge_lists(under, value, _MARKS[name], is_joined=False)
        elif isinstance(under, list) and isinstance(value, list):
            found[name] = under + [each for each in value if each not in under]
        else:
            found |= merge({name: under}, {name: value})
    return found


def merge(below: Patch, above: Mapping[str, Any]) -> Patch:
    """`above` takes precedence. Dicts are merged; lists whose items Kubernetes identifies by a key are merged, too."""
    found = dict(below)
    for key, value in above.items():
        under = found.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            found[key] = merge(under, value)
        elif isinstance(under, list) and isinstance(value, list) and key in _TOLD_APART_BY:
            found[key] = _merge_lists(under, value, _TOLD_APART_BY[key], is_joined=key in _JOINED)
        elif isinstance(under, list) and isinstance(value, list) and key in _ADDED_TO:
            found[key] = under + [each for each in value if each not in under]
        else:
            found[key] = value
    return found


_TOLD_APART_BY = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
}


# The keys that identify an item in the lists of a DAG and of a task.
_MARKS = {"volumes": "name", "volume_mounts": "mountPath"}


# The same container is merged. A volume or variable of the same name is replaced.
_JOINED = ("containers", "initContainers")


_ADDED_TO = ("tolerations", "envFrom")


def _merge_lists(below: Sequence[object], above: Sequence[object], mark: str, *, is_joined: bool) -> list[object]:
    items = [*below, *above]
    if not all(isinstance(item, dict) and isinstance(item.get(mark), str) for item in items):
        return list(above)  # the cluster will reject what is wrong with it
    found: dict[str, Patch] = {item[mark]: item for item in below}  # type: ignore[index, misc]
    for item in above:
        name = item[mark]  # type: ignore[index]
        found[name] = merge(found[name], item) if is_joined and name in found else item  # type: ignore[arg-type, assignment]
    return list(found.values())


def _in_spec(**fields: Any) -> Patch:
    return {"spec": fields}


def _in_container(**fields: Any) -> Patch:
    return {"spec": {"containers": [{"name": TASK_CONTAINER, **fields}]}}


def _image(value: object) -> Patch:
    check_image(value)
    return _in_container(image=value)


def _pull_policy(value: object) -> Patch:
    if value not in ("Always", "IfNotPresent", "Never"):
        raise ValueError("it must be Always, IfNotPresent or Never")
    return _in_container(imagePullPolicy=value)


def _resources(value: object) -> Patch:
    wanted = 'it must be a dict, as in {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}'
    if not isinstance(value, Mapping) or not value.keys() <= {"requests", "limits"}:
        raise TypeError(wanted)
    for amounts in value.values():
        if not isinstance(amounts, Mapping):
            raise TypeError(wanted)
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not _QUANTITY.fullmatch(str(amount)):
                raise ValueError(f"{name} is {amount!r:.50}: write it as '500m' or '2Gi'")
    texts = {kind: {name: str(amount) for name, amount in amounts.items()} for kind, amounts in value.items()}
    return _in_container(resources=texts)


def _env(value: object) -> Patch:
    return _in_container(env=[{"name": name, "value": text} for name, text in environment_of(value).items()])


def _names(value: object, what: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f'it must be a list of names of {what}, as in ["warehouse"]')
    for name in value:
        if not isinstance(name, str) or not _OBJECT.fullmatch(name):
            raise ValueError(f"{name!r:.100} is not a valid name")
    return list(value)


def _dicts(value: object, required: Sequence[str], example: str) -> list[Patch]:
    listed: Sequence[Any] = value if isinstance(value, Sequence) else ""
    if isinstance(listed, str) or not all(
        isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in required) for item in listed
    ):
        raise TypeError(f"it must be a list of dicts, as in {example}")
    return [dict(item) for item in listed]


def _labels_of(value: object) -> Mapping[str, str]:
    found = _texts(value)
    for name, text in found.items():
        if not _LABEL.fullmatch(text):
            raise ValueError(
                f"{name}={text!r:.100} is not a valid label: use at most 63 letters, digits, '_', '-' and '.'"
            )
    return found


def _texts(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise TypeError('it must be a dict of texts, as in {"team": "data"}')
    for name in value:
        if not isinstance(name, str) or not _KEY.fullmatch(name) or name.startswith(_OURS):
            raise ValueError(f"{name!r:.100} is not a valid key")
    return dict(value)


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not _OBJECT.fullmatch(value):
        raise TypeError(f"it must be the name of a {what}")
    return value


def _pod(value: object) -> Patch:
    if not isinstance(value, Mapping) or not value.keys() <= {"metadata", "spec"}:
        raise TypeError('it must be a part of a manifest, as in {"spec": {"hostAliases": [...]}}')
    if not all(isinstance(part, Mapping) for part in value.values()):
        raise TypeError("its metadata and spec must be dicts")
    for part in ("labels", "annotations"):
        _texts(value.get("metadata", {}).get(part, {}))
    return {key: dict(part) for key, part in value.items()}


_VOLUMES = '[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]'
_VOLUME_MOUNTS = '[{"name": "data", "mountPath": "/data"}]'
_TOLERATIONS = '[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]'

_WRITERS: dict[str, Callable[[object], Patch]] = {
    "image": _image,
    "image_pull_policy": _pull_policy,
    "image_pull_secrets": lambda raw: _in_spec(imagePullSecrets=[{"name": name} for name in _names(raw, "Secrets")]),
    "resources": _resources,
    "env": _env,
    "env_secrets": lambda raw: _in_container(envFrom=[{"secretRef": {"name": it}} for it in _names(raw, "Secrets")]),
    "env_config_maps": lambda raw: _in_container(
        envFrom=[{"configMapRef": {"name": name}} for name in _names(raw, "ConfigMaps")]
    ),
    "volumes": lambda raw: _in_spec(volumes=_dicts(raw, ("name",), _VOLUMES)),
    "volume_mounts": lambda raw: _in_container(volumeMounts=_dicts(raw, ("name", "mountPath"), _VOLUME_MOUNTS)),
    "node_selector": lambda raw: _in_spec(nodeSelector=_labels_of(raw)),
    "tolerations": lambda raw: _in_spec(tolerations=_dicts(raw, (), _TOLERATIONS)),
    "service_account": lambda raw: _in_spec(serviceAccountName=_name(raw, "service account")),
    "priority_class": lambda raw: _in_spec(priorityClassName=_name(raw, "priority class")),
    "labels": lambda raw: {"metadata": {"labels": _labels_of(raw)}},
    "annotations": lambda raw: {"metadata": {"annotations": _texts(raw)}},
    "pod": _pod,
}


POD_OPTIONS = tuple(_WRITERS)


def check_pod_option(text: str) -> None:
    """Raises UserError if a pod has no such option."""
    if text not in POD_OPTIONS:
        raise UserError(f"{text!r} is unknown: use {', '.join(POD_OPTIONS)}.")


MOST_BYTES = 16_384


_JOINS: dict[str, Callable[[Mapping[str, object], Mapping[str, object]], dict[str, JsonValue]]] = {
    "kubernetes": join_pod_options
}


_CHECKS: dict[str, Callable[[Mapping[str, object]], object]] = {
    "kubernetes": pod_patch,
    **{engine: partial(check_engine_options, engine) for engine in ENGINE_OPTIONS},
}


Options = Mapping[str, JsonValue]


def read_executor_options(value: object) -> Options:
    """The options as plain JSON. The TypeError or ValueError says what is wrong."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError('it must be a dict keyed by executor, as in {"kubernetes": {"image": "registry/etl:7"}}')
    for executor, options in value.items():
        if not isinstance(options, Mapping):
            raise TypeError(f'the options of {executor!r} must be a dict, as in {{"{executor}": {{...}}}}')
        if check := _CHECKS.get(executor):
            check(options)
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise TypeError("it may contain only texts, numbers, True, False, None, lists and dicts") from None
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES or "\\u0000" in text or "\\ud" in text:
        raise ValueError(f"it must be valid text without NUL, of at most {MOST_BYTES:,} bytes as JSON")
    return cast("Options", json.loads(text))


def place_of(dag: Options, task: Options) -> dict[str, JsonValue]:
    """The effective options of a task: the DAG's, overridden by the task's. A known executor's options are merged by its own
    rules; for any other executor dicts are merged, and everything else is replaced."""
    found = _joined(dag, task)
    for name, join in _JOINS.items():
        below, above = dag.get(name), task.get(name)
        if isinstance(below, dict) and isinstance(above, dict):
            found[name] = join(below, above)
    return found


def _joined(below: Options, above: Options) -> dict[str, JsonValue]:
    found = dict(below)
    for name, value in above.items():
        under = found.get(name)
        both = isinstance(under, dict) and isinstance(value, dict)
        found[name] = _joined(under, value) if both else value  # type: ignore[arg-type]
    return found
