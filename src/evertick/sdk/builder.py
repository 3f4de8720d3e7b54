"""A DAG under construction: its function adds tasks, passes results and draws dependencies.

Exists only until the function returns; the spec created from it is published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, Self, TypeAlias, TypeVar

from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.graph import MAX_GROUP_RETRIES
from evertick.domain.dags.spec import AssetSpec, GroupSpec, MappedGroup, TaskKind, TaskSpec
from evertick.domain.dags.validation import MAX_EDGES, MAX_TASKS
from evertick.domain.schedules.dependencies import Source
from evertick.domain.states import TriggerRule
from evertick.sdk.notify import Callback, callbacks_in
from evertick.sdk.options import read_flag, read_option, read_optional, read_whole, task_spec
from evertick.sdk.runtime import BoundTask, Placeholder
from evertick.sdk.source_location import refused

L = TypeVar("L")
_current: ContextVar[DagBuilder | None] = ContextVar("evertick_builder", default=None)
_LOCAL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBERED = re.compile(r"(.+)__(\d+)")


class Operand:
    """An operand of `>>` and `<<`, which set dependencies."""

    __slots__ = ()

    def __rshift__(self, other: L) -> L:
        link(self, other)
        return other

    def __lshift__(self, other: L) -> L:
        link(other, self)
        return other

    def __rrshift__(self, other: object) -> Self:
        link(other, self)
        return self

    def __rlshift__(self, other: object) -> Self:
        link(self, other)
        return self


class TaskRef(Operand, Placeholder):
    """The future result of a task: pass it to other tasks, or set dependencies with `>>` and `<<`.

    Its own fields have long names: `user.name` must be refused, and not be the name of the task.
    """

    __slots__ = ("dag_builder", "result_path", "task_name", "task_position")

    def __init__(self, builder: DagBuilder, position: int, name: str, path: tuple[str | int, ...] = ()) -> None:
        self.dag_builder = builder
        self.task_position = position
        self.task_name = name
        self.result_path = path

    def __repr__(self) -> str:
        return f"<result of {self.task_name}{''.join(f'[{key!r}]' for key in self.result_path)}>"

    def _known_when(self) -> str:
        keys = "".join(f"[{key!r}]" for key in self.result_path)
        return f"the result{keys} of task {self.task_name!r} is known only after the task has run"

    def __getitem__(self, key: str | int) -> TaskRef:
        """A part of the result: a name that the task pushes, a key of the dict or an index in the list that it returns."""
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise refused(f"{self!r} takes a name or a number as its key, not {key!r}.")
        names = self.dag_builder.specs[self.task_position].outputs
        if names and not self.result_path and key not in names:
            raise refused(f"task {self.task_name!r} has no output {key!r}; it has: {', '.join(names)}.")
        return TaskRef(self.dag_builder, self.task_position, self.task_name, (*self.result_path, key))

    def as_setup(self) -> TaskRef:
        """Mark it as a setup: cleared with the tasks that depend on it, and its teardown runs only if it succeeded."""
        self.dag_builder.change(self.task_position, is_setup=True)
        return self

    def as_teardown(self, *, setups: TaskRef | Sequence[TaskRef] = (), on_failure_fail_dagrun: bool = False) -> TaskRef:
        """Mark it as a teardown of `setups`: it runs once all upstream tasks have ended. It does not affect the run's state."""
        name, rule = self.task_name, TriggerRule.ALL_DONE_SETUP_SUCCESS
        fails_run = read_option(f"task {name!r}", "on_failure_fail_dagrun", on_failure_fail_dagrun, read_flag)
        self.dag_builder.change(self.task_position, is_teardown=True, fails_run=fails_run, trigger_rule=rule)
        for each in setups if isinstance(setups, list | tuple) else [setups]:
            if not isinstance(each, TaskRef):
                raise refused(f"task {name!r}: setups must be called tasks, as in setups=create(), not {each!r}.")
            each.as_setup()
            self.dag_builder.connect(each, self)
        return self


# A TaskRef whose value's type is not known. For type checkers it fits every parameter.
FutureResult: TypeAlias = Any


class TaskGroup(Operand):
    """A named part of a DAG: `with task_group("extract"):`. Its name is part of its tasks' names, and `>>` works on it too."""

    def __init__(self, name: str, max_active: int | None = None, retries: int = 0) -> None:
        self.local_name = name
        self.name = name
        owner = f"task group {name!r}"
        self.retries = read_option(owner, "retries", retries, read_whole(0, MAX_GROUP_RETRIES))
        self.max_active = read_option(owner, "max_active", max_active, read_optional(read_whole(1)))
        self.builder: DagBuilder | None = None
        self.members: list[int] = []

    def __repr__(self) -> str:
        return f"<task group {self.name}>"

    def __enter__(self) -> TaskGroup:
        if self.builder is not None:
            raise refused(f"task group {self.name!r} was already entered; create a new one with its own name.")
        self.builder = current_builder(f"task group {self.local_name!r}")
        self.name = self.builder.claim_name(self.local_name)
        if self.retries:
            self.builder.retried_groups.append(GroupSpec(name=self.name, retries=self.retries))
        self.builder.open_groups.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self.builder is not None:
            self.builder.open_groups.remove(self)


class DagBuilder:
    """Everything that a DAG's function has declared so far."""

    def __init__(self, name: str, task_defaults: Mapping[str, object]) -> None:
        self.name = name
        if (outer := _current.get()) is not None:
            raise refused(f"DAG {name!r} was called inside DAG {outer.name!r}; call it outside of that function.")
        self.task_defaults = task_defaults
        self.specs: list[TaskSpec] = []
        self.bound: list[BoundTask] = []
        self.edges: set[tuple[int, int]] = set()
        self.upstream: list[list[int]] = []
        self.downstream: list[list[int]] = []
        self.open_groups: list[TaskGroup] = []
        self.retried_groups: list[GroupSpec] = []
        self.mapped_groups: list[MappedGroup] = []
        self._taken: set[str] = set()
        self.template_params: dict[str, str] = {}
        self._highest_number: dict[str, int] = {}
        self.callbacks: dict[str, Callback] = {}
        self.assets: dict[str, AssetSpec] = {}

    @property
    def group(self) -> str | None:
        return self.open_groups[-1].name if self.open_groups else None

    def claim_name(self, local: str, *, numbered: bool = False) -> str:
        """The full name for a new task or group. A duplicate is numbered as in Airflow, or refused."""
        if local == "<lambda>":
            raise refused("a lambda has no name for its task: pass one, as in task(name='double')(lambda x: 2 * x).")
        if not isinstance(local, str) or not _LOCAL_NAME.fullmatch(local):
            raise refused(f"{local!r} is not a valid name for a task or group: use ASCII letters, digits, '_' and '-'.")
        name = f"{self.group}.{local}" if self.group else local
        if name in self._taken and not numbered:
            raise refused(f"DAG {self.name!r} already has a task or group {name!r}; give this one a different name.")
        if name in self._taken:
            stem = _NUMBERED.fullmatch(name)
            core = stem.group(1) if stem else name
            name = f"{core}__{self._highest_number.get(core, 0) + 1}"
        self._taken.add(name)
        if number := _NUMBERED.fullmatch(name):
            core, used = number.group(1), int(number.group(2))
            self._highest_number[core] = max(used, self._highest_number.get(core, 0))
        return name

    def note_params(self, task: str, names: Iterable[str]) -> None:
        """Record the parameters that a task's templates use; they are checked once the DAG is complete."""
        self.template_params.update(dict.fromkeys(names, task))

    def note_callbacks(self, options: Mapping[str, object]) -> None:
        """Record the functions in these options: a separate DAG calls each of them."""
        for each in callbacks_in(options):
            known = self.callbacks.setdefault(each.name, each)
            if known.function is not each.function or known.options != each.options:
                raise refused(
                    f"DAG {self.name!r} has two callbacks named {each.name!r}; name one with notify.call(..., name='other')."
                )

    def _note_assets(self, outlets: object) -> None:
        """Record which partitions the assets have that a task updates."""
        for each in outlets if isinstance(outlets, Iterable) else ():
            if isinstance(each, Source) and each.partitions is not None:
                partitions = json.loads(each.partitions.to_text())
                self.assets[each.name] = AssetSpec(name=each.name, partitions=partitions)

    def add(
        self, bound: BoundTask, options: Mapping[str, object], upstream: Mapping[str, TaskRef], **fields: Any
    ) -> TaskRef:
        """Add a task that takes the results of `upstream`, with these options and other fields of its spec."""
        spec = task_spec(bound.name, options)
        spec = replace(spec, kind=bound.kind, group=self.group, inputs=tuple(upstream), **fields)
        self.note_callbacks(options)
        self._note_assets(options.get("outlets", ()))
        position = len(self.specs)
        if position >= MAX_TASKS:
            raise refused(f"DAG {self.name!r} has more than {MAX_TASKS:,} tasks.")
        limited = [group for group in self.open_groups if group.max_active is not None]
        if limited and not spec.runs_nowhere:
            gates = [GateSpec(kind=GateKind.GROUP, name=group.name, capacity=group.max_active) for group in limited]
            spec = replace(spec, gates=(*gates, *spec.gates))
        self.specs.append(spec)
        # A shell command has only an exit code: a default `retry_on` of its DAG does not apply to it.
        self.bound.append(bound if bound.kind is TaskKind.SHELL else replace(bound, retry=spec.retry))
        self.upstream.append([])
        self.downstream.append([])
        for group in self.open_groups:
            group.members.append(position)
        ref = TaskRef(self, position, spec.name)
        for each in upstream.values():
            self.connect(each, ref)
        return ref

    def change(self, position: int, **fields: Any) -> None:
        self.specs[position] = replace(self.specs[position], **fields)

    def connect(self, up: TaskRef, down: TaskRef) -> None:
        for ref in (up, down):
            if ref.dag_builder is not self:
                raise refused(
                    f"task {ref.task_name!r} belongs to DAG {ref.dag_builder.name!r} and cannot be used in DAG {self.name!r}."
                )
        edge = (up.task_position, down.task_position)
        if edge in self.edges:
            return
        if len(self.edges) >= MAX_EDGES:
            raise refused(
                f"DAG {self.name!r} has more than {MAX_EDGES:,} dependencies; put a joining task between the groups."
            )
        self.edges.add(edge)
        self.upstream[down.task_position].append(up.task_position)
        self.downstream[up.task_position].append(down.task_position)


@contextmanager
def building(builder: DagBuilder) -> Iterator[None]:
    """Let the tasks that are called within the block become tasks of `builder`."""
    token = _current.set(builder)
    try:
        yield
    finally:
        _current.reset(token)


def current_builder(what: str, instead: str = "") -> DagBuilder:
    """The DAG whose function is running, or an error that names the call outside of one."""
    builder = _current.get()
    if builder is None:
        raise refused(f"{what} was used outside a DAG: use it in a function decorated with @dag{instead}.")
    return builder


def link(up: object, down: object) -> None:
    """Make every task in `down` depend on every task in `up`."""
    downs = list(_refs(down, first=True))
    for upper, lower in product(_refs(up, first=False), downs):
        lower.dag_builder.connect(upper, lower)


def chain(*steps: object) -> None:
    """Run each step after the one before it: `chain(extract(), [clean(), check()], load())`. A step is a task, a group or a list.

    The same as `>>`, which type checkers do not know between two tasks with results.
    """
    for up, down in pairwise(steps):
        if isinstance(up, list | tuple) and isinstance(down, list | tuple):
            raise refused("chain: two lists follow each other; write the dependencies between their tasks with >>.")
        link(up, down)


def _refs(side: object, *, first: bool) -> Iterator[TaskRef]:
    match side:
        case TaskRef():
            yield side
        case TaskGroup():
            yield from _ends(side, first=first)
        case Sequence() if not isinstance(side, str | bytes):
            for each in side:
                yield from _refs(each, first=first)
        case _:
            raise refused(
                f"{side!r} cannot be an operand of >> or <<: call the task first, as in `extract() >> load()`."
            )


def first_tasks(group: TaskGroup) -> list[TaskRef]:
    return list(_ends(group, first=True))


def _ends(group: TaskGroup, *, first: bool) -> Iterator[TaskRef]:
    """The tasks of a group with no task of the group before them (first) or after them (last).

    Teardowns of a group are not among the last: tasks after the group do not wait for them.
    """
    builder = group.builder
    if builder is None or group in builder.open_groups:
        raise refused(f"task group {group.name!r} takes dependencies only after its `with` block.")
    if not group.members:
        raise refused(f"task group {group.name!r} has no tasks.")
    members = set(group.members)
    if not first and (workers := {each for each in members if not builder.specs[each].is_teardown}):
        members = workers
    neighbours = builder.upstream if first else builder.downstream
    for position in group.members:
        if position in members and members.isdisjoint(neighbours[position]):
            yield TaskRef(builder, position, builder.specs[position].name)
