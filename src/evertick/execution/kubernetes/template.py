"""A runner's pod template: an operator's YAML file, merged over Evertick's defaults for every pod. Read once, at
startup."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from evertick.domain.errors import InvalidSettings
from evertick.domain.pod_options import TASK_CONTAINER, merge
from evertick.execution.kubernetes.manifest import DEFAULT_TEMPLATE, Manifest


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
