"""Executor options: `executor_options` of DAGs and tasks say, per executor name, where and how it runs a task.

A task may be routed to any executor, so each has its own section and ignores the others. The options of executors known here are
checked when the DAG is published; the executor itself rejects invalid options of any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import cast

from evertick.domain.params import JsonValue
from evertick.domain.pod_options import check_pod_options, join_pod_options

MOST_BYTES = 16_384
_JOINS: dict[str, Callable[[Mapping[str, object], Mapping[str, object]], dict[str, JsonValue]]] = {
    "kubernetes": join_pod_options
}
_CHECKS: dict[str, Callable[[Mapping[str, object]], None]] = {"kubernetes": check_pod_options}

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
