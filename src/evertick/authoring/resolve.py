"""Maps published names back to code: the tasks of a loaded DAG file, and the arguments of each call.

Used by the process that runs an attempt. The spec contains only names; constants and functions stay in the user's file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Unpack

from evertick.authoring.context import current_context
from evertick.authoring.location import refused
from evertick.authoring.outputs import part_of
from evertick.domain.dag import DagSpec, TaskKind
from evertick.domain.errors import NotFound, UserError
from evertick.domain.mapping import ITEM
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedule import ScheduleSpec

if TYPE_CHECKING:
    from evertick.authoring.rehearse import Rehearsal, RehearsalOptions


@dataclass(frozen=True, slots=True)
class ResultOf:
    """A placeholder in an argument for the result of the named upstream task, or for a part of it."""

    task: str
    path: tuple[str | int, ...] = ()


class ParamRef:
    """A placeholder in an argument for a parameter of the run, which is known when the task runs."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<param {self.name}>"

    def __bool__(self) -> bool:
        raise self._unknown()

    def __iter__(self) -> Iterator[object]:
        raise self._unknown()

    def __str__(self) -> str:
        raise self._unknown()

    def __eq__(self, other: object) -> bool:
        raise self._unknown()

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __mul__ = __rmul__ = __eq__
    __hash__ = object.__hash__

    def _unknown(self) -> Exception:
        return refused(f"param {self.name!r} is known only when a run starts: pass it to a task, and use it there.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One request. Its texts may be templates, unless the task disables them."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    json: object = None
    body: str | None = None
    expect: tuple[int, ...] = ()
    response: str = "auto"
    timeout_seconds: float = 30.0
    max_bytes: int = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """A program that uses the JSON lines protocol."""

    argv: tuple[str, ...]


class ListArgument(NamedTuple):
    """A mapped task's list for an argument; `elements` is None if another task returns it."""

    argument: str | None
    elements: tuple[object, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTask:
    """A task with the arguments of its call in the DAG. `function` is None for a task that is not a Python function.

    `template_inputs` are the `inputs` of its templates. `polls`: it is a sensor's condition, called repeatedly.
    """

    name: str
    kind: TaskKind = TaskKind.PYTHON
    function: Callable[..., object] | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    is_async: bool = False
    wants_context: bool = False
    command: str | None = None
    env: Mapping[str, object] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    call: HttpCall | ProgramCall | None = None
    is_template: bool = False
    schedule: ScheduleSpec | None = None
    template_inputs: Mapping[str, object] = field(default_factory=dict)
    lists: tuple[ListArgument, ...] = ()
    polls: bool = False

    def call_arguments(self, inputs: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments for `function`. An upstream task without a result (skipped, failed) gives None.

        A parameter named `context` receives the current context, which must be entered before.
        """
        args = tuple(_filled(value, inputs) for value in self.args) if self.args else ()
        kwargs = {name: _filled(value, inputs) for name, value in self.kwargs.items()} if self.kwargs else {}
        if self.lists:
            kwargs.update(_of_instance(self, inputs[ITEM]))
        if self.wants_context:
            kwargs["context"] = current_context()
        return args, kwargs

    def template_names(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """The names that the task's templates can use. The context must be entered."""
        context = current_context()
        return {
            "params": context.params,
            "inputs": {name: _filled(value, inputs) for name, value in self.template_inputs.items()},
            "variables": context.variables,
            "connections": context.connections,
            "secrets": context.secrets,
            "run_id": context.run_id,
            "dag": context.dag,
            "task": context.task,
            "map_index": context.map_index,
            "attempt": context.attempt,
            "idempotency_key": context.idempotency_key,
            "fire_at": context.fire_at,
            "data_interval_start": context.data_interval_start,
            "data_interval_end": context.fire_at,
        }

    def environment(self, inputs: Mapping[str, object]) -> dict[str, str]:
        """The variables that a shell task adds to its environment. Text is unchanged, other values become JSON."""
        values = {name: _filled(value, inputs) for name, value in self.env.items()}
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """A compiled DAG: its published spec, and the code of each of its tasks."""

    spec: DagSpec
    tasks: Mapping[str, BoundTask]
    # The DAGs that call its callbacks; they are published with it.
    callbacks: tuple[Dag, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name

    def test(self, **options: Unpack[RehearsalOptions]) -> Rehearsal:
        """Run the whole DAG in this process, without a server; see `authoring/rehearse.py`."""
        from evertick.authoring.rehearse import rehearse

        return rehearse(self.spec, self.tasks, options)


def find_task(dags: Mapping[str, Dag], dag_name: str, task_name: str) -> BoundTask:
    """The task by its published name."""
    if (dag := dags.get(dag_name)) is None:
        raise NotFound(f"the DAG file has no DAG {dag_name!r}; it has: {', '.join(sorted(dags)) or 'none'}.")
    if (bound := dag.tasks.get(task_name)) is None:
        raise NotFound(
            f"DAG {dag_name!r} has no task {task_name!r}. Does its file build the same tasks at every import?"
        )
    return bound


def _of_instance(bound: BoundTask, item: object) -> dict[str, object]:
    """The arguments of one instance: for each list either the element itself or, for a list in the code, its index."""
    found: dict[str, object] = {}
    assert isinstance(item, list)
    for given, (argument, elements) in zip(item, bound.lists, strict=True):
        if elements is not None and given >= len(elements):
            raise UserError(
                f"task {bound.name!r} had more elements to expand over when its DAG was published. "
                "Does its file build the same lists at every import?"
            )
        value = given if elements is None else elements[given]
        found.update(value if argument is None else {argument: value})
    return found


def _filled(value: object, inputs: Mapping[str, object]) -> object:
    """Only plain containers can hold results; any other object is passed unchanged."""
    if isinstance(value, ResultOf):
        return part_of(value.task, inputs.get(value.task), value.path)
    if isinstance(value, ParamRef):
        return current_context().params.get(value.name)
    if type(value) is list:
        return [_filled(each, inputs) for each in value]
    if type(value) is tuple:
        return tuple(_filled(each, inputs) for each in value)
    if type(value) is dict:
        return {name: _filled(each, inputs) for name, each in value.items()}
    return value
