"""From a published name back to code: the tasks of a loaded DAG file, and the arguments to call each with.

Used by the process that runs an attempt. The spec carries names only; constants and functions stay in the user's file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from evertick.authoring.context import current_context
from evertick.domain.dag import DagSpec, TaskKind
from evertick.domain.errors import NotFound


@dataclass(frozen=True, slots=True)
class ResultOf:
    """Stands in an argument for what the named upstream task will have returned."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTask:
    """A task together with what its DAG calls it with. `function` is None for a shell task."""

    name: str
    kind: TaskKind = TaskKind.PYTHON
    function: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    is_async: bool = False
    wants_context: bool = False
    command: str | None = None
    env: Mapping[str, object] = field(default_factory=dict)

    def call_arguments(self, inputs: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments for `function`. An upstream task without a result (skipped, failed) gives None.

        A function with a parameter named `context` gets the current one, which must be entered before.
        """
        args = tuple(_filled(value, inputs) for value in self.args) if self.args else ()
        kwargs = {name: _filled(value, inputs) for name, value in self.kwargs.items()} if self.kwargs else {}
        if self.wants_context:
            kwargs["context"] = current_context()
        return args, kwargs

    def environment(self, inputs: Mapping[str, object]) -> dict[str, str]:
        """The variables that a shell task adds to its environment. Text stays as it is, the rest becomes JSON."""
        values = {name: _filled(value, inputs) for name, value in self.env.items()}
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """A compiled DAG: what is published, and the code behind each of its tasks."""

    spec: DagSpec
    tasks: Mapping[str, BoundTask]

    @property
    def name(self) -> str:
        return self.spec.name


def find_task(dags: Mapping[str, Dag], dag_name: str, task_name: str) -> BoundTask:
    """The task by its published name."""
    if (dag := dags.get(dag_name)) is None:
        raise NotFound(f"the DAG file has no DAG {dag_name!r}; it has: {', '.join(sorted(dags)) or 'none'}.")
    if (bound := dag.tasks.get(task_name)) is None:
        raise NotFound(
            f"DAG {dag_name!r} has no task {task_name!r}. Does its file build the same tasks at every import?"
        )
    return bound


def _filled(value: object, inputs: Mapping[str, object]) -> object:
    """Only plain containers can hold results; what else a DAG passes arrives as the object it is."""
    if isinstance(value, ResultOf):
        return inputs.get(value.task)
    if type(value) is list:
        return [_filled(each, inputs) for each in value]
    if type(value) is tuple:
        return tuple(_filled(each, inputs) for each in value)
    if type(value) is dict:
        return {name: _filled(each, inputs) for name, each in value.items()}
    return value
