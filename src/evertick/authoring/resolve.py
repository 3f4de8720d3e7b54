"""From a published name back to code: the tasks of a loaded DAG file, and the arguments to call each with.

Used by the process that runs an attempt. The spec carries names only; constants and functions stay in the user's file.
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
    """Stands in an argument for what the named upstream task will have returned, or for a part of it."""

    task: str
    path: tuple[str | int, ...] = ()


class ParamRef:
    """Stands in an argument for a parameter of the run, which is known when the task runs."""

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
        return refused(
            f"param {self.name!r} is known only when a run starts: pass it to a task, and decide or compute there."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One request. Texts may be templates, unless the task says otherwise."""

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
    """A program that speaks the protocol of JSON lines."""

    argv: tuple[str, ...]


class ListArgument(NamedTuple):
    """A list that a mapped task is given for an argument; `elements` is None where another task returns it."""

    argument: str | None
    elements: tuple[object, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTask:
    """A task together with what its DAG calls it with. `function` is None for a task that is no Python function.

    `template_inputs` are what its templates know as `inputs`. `polls`: it says whether something has come about, again and again.
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

        A function with a parameter named `context` gets the current one, which must be entered before.
        """
        args = tuple(_filled(value, inputs) for value in self.args) if self.args else ()
        kwargs = {name: _filled(value, inputs) for name, value in self.kwargs.items()} if self.kwargs else {}
        if self.lists:
            kwargs.update(_of_instance(self, inputs[ITEM]))
        if self.wants_context:
            kwargs["context"] = current_context()
        return args, kwargs

    def template_names(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """What the task's templates know. The context must be entered."""
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
        """The variables that a shell task adds to its environment. Text stays as it is, the rest becomes JSON."""
        values = {name: _filled(value, inputs) for name, value in self.env.items()}
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """A compiled DAG: what is published, and the code behind each of its tasks."""

    spec: DagSpec
    tasks: Mapping[str, BoundTask]
    # The DAGs that call its callbacks; they are published with it.
    callbacks: tuple[Dag, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.name

    def test(self, **options: Unpack[RehearsalOptions]) -> Rehearsal:
        """Run all of it here and now, without a server; see `authoring/rehearse.py`."""
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
    """The arguments of one instance: of each list either the element itself or, where the list is in the code, its place."""
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
    """Only plain containers can hold results; what else a DAG passes arrives as the object it is."""
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
