"""The pod and the Secret of one attempt, from the template, the options of its DAG and task, and fixed fields.

The fixed fields are applied last: no template and no option changes the pod's name, its labels, its command, or that it
runs once. The start token is only in the Secret, which is mounted as a file: many users can read a pod's manifest and
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from evertick.domain.attempt import session_text
from evertick.domain.errors import InvalidSettings, SubmissionRefused
from evertick.domain.executor_options import TASK_CONTAINER, merge, pod_patch
from evertick.executors.base import Order, RemoteOrder

OWNER_LABEL = "evertick.io/owner"


SESSION_LABEL = "evertick.io/session"


KEPT_LABEL = "evertick.io/kept"


UNTIL_ANNOTATION = "evertick.io/kept-until"


# The kubelet shows the content of this file in the pod's status, whatever happens to the agent.
OUTCOME_FILE = "/dev/termination-log"


TOKEN_FOLDER = "/var/run/evertick/start"


HOME_FOLDER = "/var/run/evertick/home"


_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.-]+")


_LONGEST_LABEL = 63


_OUR_KEYS = "evertick.io/"


Manifest = dict[str, Any]


# Least privilege: a task talks only to Evertick's API, and has no rights on its node.
DEFAULT_TEMPLATE: Manifest = {
    "metadata": {"labels": {"app.kubernetes.io/part-of": "evertick", "app.kubernetes.io/component": "task"}},
    "spec": {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": TASK_CONTAINER,
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    },
}


def pod_manifest(order: Order, template: Manifest, *, owner: str, allowed: Collection[str]) -> Manifest:
    """Raises SubmissionRefused for options that a pod does not have, or that DAGs may not set here."""
    options = order.place.get("kubernetes") or {}
    if not isinstance(options, dict):
        raise SubmissionRefused(f"the kubernetes options of {order.what} must be a dict.")
    if forbidden := sorted(options.keys() - set(allowed)):
        raise SubmissionRefused(
            f"the kubernetes options of {order.what} set {', '.join(forbidden)}, which EVERTICK_POD_OPTIONS does not allow."
        )
    try:
        patched = merge(template, pod_patch(options))
    except (TypeError, ValueError) as error:
        raise SubmissionRefused(f"the kubernetes options of {order.what} are wrong: {error}.") from None
    ours = _ours(order, owner)
    written = patched.get("metadata") or {}
    for part in ("labels", "annotations"):
        theirs = {key: text for key, text in (written.get(part) or {}).items() if not key.startswith(_OUR_KEYS)}
        ours["metadata"][part] = theirs | ours["metadata"][part]
    # Nothing else of a template's metadata applies to tasks: finalizers would keep a pod permanently.
    return {**ours, "spec": merge(patched["spec"], ours["spec"])}


def secret_manifest(order: Order, *, owner: str, pod_uid: str) -> Manifest:
    """The pod owns it: Kubernetes deletes it with the pod."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": order.name,
            "labels": {OWNER_LABEL: owner, SESSION_LABEL: session_text(order.session)},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": order.name, "uid": pod_uid}],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {"token": order.token},
    }


def _ours(order: Order, owner: str) -> Manifest:
    names = {f"{_OUR_KEYS}{name}": text for name, text in order.labels.items() if name != "queue"}
    notes = {f"{_OUR_KEYS}queue": order.queue}
    if isinstance(order, RemoteOrder):
        notes |= {f"{_OUR_KEYS}map-index": str(order.key.map_index), f"{_OUR_KEYS}epoch": str(order.epoch)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": order.name,
            "labels": {
                "app.kubernetes.io/managed-by": "evertick",
                OWNER_LABEL: owner,
                SESSION_LABEL: session_text(order.session),
                **{name: _label(text) for name, text in names.items()},
            },
            "annotations": names | notes,
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [_container(order)],
            "volumes": [
                # The pod's group may read it (fsGroup), so that root is not needed.
                {"name": "evertick-start", "secret": {"secretName": order.name, "defaultMode": 0o440}},
                {"name": "evertick-home", "emptyDir": {}},
            ],
        },
    }


def _container(order: Order) -> Manifest:
    if isinstance(order, RemoteOrder):
        command = {"command": ["evertick", "agent"], "args": ["--outcome-file", OUTCOME_FILE]}
    else:
        command = {"command": ["evertick", "runner"]}
    variables = {**order.variables(token_file=f"{TOKEN_FOLDER}/token"), "EVERTICK_HOME": HOME_FOLDER}
    return {
        "name": TASK_CONTAINER,
        **command,
        "terminationMessagePath": OUTCOME_FILE,
        "terminationMessagePolicy": "File",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [
            {"name": "evertick-start", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "evertick-home", "mountPath": HOME_FOLDER},
        ],
    }


def _label(text: str) -> str:
    """As much of a name as fits into a label; the full name is in the annotation."""
    return _NOT_IN_LABELS.sub("_", text)[:_LONGEST_LABEL].strip("_.-")


def read_template(file: Path | None, *, image: str) -> Manifest:
    """Raises InvalidSettings, which names the file and the problem."""
    template = merge(DEFAULT_TEMPLATE, {"spec": {"containers": [{"name": TASK_CONTAINER, "image": image}]}})
    if file is None:
        return template
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(file, f"it cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong(file, f"it is not YAML: {' '.join(str(error).split())}") from None
    return merge(template, _checked(file, found))


def _checked(file: Path, found: object) -> Manifest:
    if not isinstance(found, dict) or found.get("kind", "Pod") != "Pod" or found.get("apiVersion", "v1") != "v1":
        raise _wrong(file, "it must be one manifest of a Pod (apiVersion v1), or its metadata and spec")
    if unknown := sorted(str(key) for key in found.keys() - {"apiVersion", "kind", "metadata", "spec"}):
        raise _wrong(file, f"a template has no {unknown[0]!r}; it has metadata and spec")
    for part in ("metadata", "spec"):
        if not isinstance(found.get(part, {}), dict):
            raise _wrong(file, f"its {part} must be a mapping")
    for part in ("labels", "annotations"):
        texts = found.get("metadata", {}).get(part, {})
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in (*texts, *texts.values())):
            raise _wrong(file, f"its {part} must be a mapping of texts: put numbers and true or false in quotes")
    spec = found.get("spec", {})
    containers = spec.get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(each, dict) and each.get("name") for each in containers):
        raise _wrong(file, "its containers must be a list, and each must have a name")
    if containers and TASK_CONTAINER not in [each["name"] for each in containers]:
        raise _wrong(file, f"none of its containers is named {TASK_CONTAINER!r}: that is the one in which tasks run")
    if spec.get("restartPolicy", "Never") != "Never":
        raise _wrong(file, "its restartPolicy must be Never: an attempt runs once, and Evertick decides about the next")
    return found


def _wrong(file: Path, what: str) -> InvalidSettings:
    return InvalidSettings(
        f"The pod template {file} cannot be used: {what}. Correct the file, or EVERTICK_POD_TEMPLATE."
    )
