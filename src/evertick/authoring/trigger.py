"""`trigger_dag`: a task that starts another DAG. The scheduler does it; no runner is used, however long it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from evertick.authoring.draft import TaskRef, current_draft
from evertick.authoring.location import refused
from evertick.authoring.notify import NOTICE_OPTIONS
from evertick.authoring.options import TaskOptions, task_spec
from evertick.authoring.resolve import BoundTask, ParamRef
from evertick.domain.dag import ChildSpec, TaskKind
from evertick.domain.params import JsonValue, as_json

# The DAG's defaults that apply to a task without a runner.
_KEPT = ("trigger_rule", "timeout", "finish_within", *NOTICE_OPTIONS)


def trigger_dag(
    dag: str, /, *, params: Mapping[str, object] | None = None, wait: bool = True, **options: Unpack[TaskOptions]
) -> TaskRef:
    """Start a run of another DAG. With `wait` the task ends as that run does, or fails after its `timeout`. Its result is
    the id of the run. A param is a constant, the result of another task, or a parameter of this DAG."""
    draft = current_draft(f"trigger_dag({dag!r})")
    if not isinstance(dag, str) or not dag:
        raise refused(f"trigger_dag takes the name of a DAG, not {dag!r}.")
    if not isinstance(wait, bool):
        raise refused(f"trigger_dag({dag!r}): wait must be True or False, not {wait!r}.")
    if params is not None and not isinstance(params, Mapping):
        raise refused(f"trigger_dag({dag!r}): params must be a dict, not {params!r}.")
    refs: dict[str, TaskRef] = {}
    constants, given = _split(dag, params or {}, refs)
    local = options.get("name") or f"trigger_{dag}".replace(".", "_")
    name = draft.claim_name(local, numbered="name" not in options)
    kept = {key: value for key, value in draft.task_defaults.items() if key in _KEPT}
    draft.note_callbacks({**kept, **options})
    spec = replace(
        task_spec(name, {**kept, **options}),
        kind=TaskKind.TRIGGER,
        group=draft.group,
        inputs=tuple(refs),
        child=ChildSpec(dag=dag, params=constants, given=given, waits=wait),
    )
    ref = draft.add(spec, BoundTask(name=name, kind=TaskKind.TRIGGER))
    for upstream in refs.values():
        draft.connect(upstream, ref)
    return ref


def _split(
    dag: str, params: Mapping[str, object], refs: dict[str, TaskRef]
) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """The params known now, and those known when the run starts. `refs` collects the tasks whose results are needed."""
    constants: dict[str, JsonValue] = {}
    given: dict[str, JsonValue] = {}
    for name, value in params.items():
        if isinstance(value, TaskRef):
            refs[value.name] = value
            given[str(name)] = {"task": value.name, "path": list(value.path)}
        elif isinstance(value, ParamRef):
            given[str(name)] = {"param": value.name}
        else:
            try:
                constants[str(name)] = as_json(value)
            except ValueError as error:
                raise refused(
                    f"trigger_dag({dag!r}): param {name!r} must be a constant, the result of a task, or a parameter of"
                    f" this DAG, not a value that contains one: {error}."
                ) from None
    return constants, given
