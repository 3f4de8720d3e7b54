"""A DAG under construction: its function adds tasks, passes results and draws dependencies.

Exists only until the function returns; the spec created from it is published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Never, TypeVar

from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.graph import MAX_GROUP_RETRIES
from evertick.domain.dags.spec import GroupSpec, TaskSpec
from evertick.domain.dags.validation import MAX_EDGES, MAX_TASKS
from evertick.domain.states import TriggerRule
from evertick.sdk.notify import Callback, callbacks_in
from evertick.sdk.options import check_names
from evertick.sdk.runtime import BoundTask
from evertick.sdk.source_location import refused

L = TypeVar("L")
_drafting: ContextVar[DagBuilder | None] = ContextVar("evertick_draft", default=None)
_LOCAL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBERED = re.compile(r"(.+)__(\d+)")


class TaskRef:
    """The future result of a task: pass it to other tasks, or set dependencies with `>>` and `<<`."""

    __slots__ = ("draft", "name", "path", "position")

    def __init__(self, draft: DagBuilder, position: int, name: str, path: tuple[str | int, ...] = ()) -> None:
        self.draft = draft
        self.position = position
        self.name = name
        self.path = path

    def __repr__(self) -> str:
        return f"<result of {self.name}{''.join(f'[{key!r}]' for key in self.path)}>"

    def __getitem__(self, key: str | int) -> TaskRef:
        """A part of the result: a name that the task pushes, a key of the dict or an index in the list that it returns."""
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise refused(f"{self!r} takes a name or a number as its key, not {key!r}.")
        names = self.draft.specs[self.position].outputs
        if names and not self.path and key not in names:
            raise refused(f"task {self.name!r} has no output {key!r}; it has: {', '.join(names)}.")
        return TaskRef(self.draft, self.position, self.name, (*self.path, key))

    def __iter__(self) -> Iterator[object]:
        raise refused(f"{self!r} is known only after the task has run: a DAG's function cannot loop over it.")

    def __rshift__(self, other: L) -> L:
        link(self, other)
        return other

    def __lshift__(self, other: L) -> L:
        link(other, self)
        return other

    def __rrshift__(self, other: object) -> TaskRef:
        link(other, self)
        return self

    def __rlshift__(self, other: object) -> TaskRef:
        link(self, other)
        return self

    def as_setup(self) -> TaskRef:
        """Mark it as a setup: cleared with the tasks that depend on it, and its teardown runs only if it succeeded."""
        self.draft.change(self.position, is_setup=True)
        return self

    def as_teardown(self, *, setups: TaskRef | Sequence[TaskRef] = (), on_failure_fail_dagrun: bool = False) -> TaskRef:
        """Mark it as a teardown of `setups`: it runs once all upstream tasks have ended. It does not affect the run's state."""
        if not isinstance(on_failure_fail_dagrun, bool):
            raise refused(f"task {self.name!r}: on_failure_fail_dagrun must be True or False.")
        rule = TriggerRule.ALL_DONE_SETUP_SUCCESS
        self.draft.change(self.position, is_teardown=True, fails_run=on_failure_fail_dagrun, trigger_rule=rule)
        for each in setups if isinstance(setups, list | tuple) else [setups]:
            if not isinstance(each, TaskRef):
                raise refused(f"task {self.name!r}: setups must be called tasks, as in setups=create(), not {each!r}.")
            each.as_setup()
            self.draft.connect(each, self)
        return self


class TaskGroup:
    """A named part of a DAG: `with task_group("extract"):`. Its name is part of its tasks' names, and `>>` works on it too."""

    def __init__(self, name: str, max_active: int | None = None, retries: int = 0) -> None:
        self.local_name = name
        self.name = name
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= MAX_GROUP_RETRIES:
            raise refused(f"task group {name!r}: retries is {retries!r}, but it must be from 0 to {MAX_GROUP_RETRIES}.")
        self.retries = retries
        if max_active is not None and (
            isinstance(max_active, bool) or not isinstance(max_active, int) or max_active < 1
        ):
            raise refused(f"task group {name!r}: max_active is {max_active!r}, but it must be 1 or more.")
        self.max_active = max_active
        self.draft: DagBuilder | None = None
        self.members: list[int] = []

    def __repr__(self) -> str:
        return f"<task group {self.name}>"

    def __enter__(self) -> TaskGroup:
        if self.draft is not None:
            raise refused(f"task group {self.name!r} was already entered; create a new one with its own name.")
        self.draft = current_builder(f"task group {self.local_name!r}")
        self.name = self.draft.claim_name(self.local_name)
        if self.retries:
            self.draft.retried_groups.append(GroupSpec(name=self.name, retries=self.retries))
        self.draft.open_groups.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.draft is not None:
            self.draft.open_groups.remove(self)

    def __rshift__(self, other: L) -> L:
        link(self, other)
        return other

    def __lshift__(self, other: L) -> L:
        link(other, self)
        return other

    def __rrshift__(self, other: object) -> TaskGroup:
        link(other, self)
        return self

    def __rlshift__(self, other: object) -> TaskGroup:
        link(self, other)
        return self


def task_group(name: str, *, max_active: int | None = None, retries: int = 0, **unknown: Never) -> TaskGroup:
    """Open a group of tasks with `with task_group("extract"):`. Groups can be nested.

    `max_active` limits how many of its tasks may be available or running at once in one run. `retries` is how often the whole
    group runs again after a failure; the tasks after it start once all of it has ended.
    """
    check_names(f"task group {name!r}", unknown, ("max_active", "retries"))
    return TaskGroup(name, max_active, retries)


class DagBuilder:
    """Everything that a DAG's function has declared so far."""

    def __init__(self, name: str, task_defaults: Mapping[str, object]) -> None:
        self.name = name
        if (outer := _drafting.get()) is not None:
            raise refused(f"DAG {name!r} was called inside DAG {outer.name!r}; call it outside of that function.")
        self.task_defaults = task_defaults
        self.specs: list[TaskSpec] = []
        self.bound: list[BoundTask] = []
        self.edges: set[tuple[int, int]] = set()
        self.upstream: list[list[int]] = []
        self.downstream: list[list[int]] = []
        self.open_groups: list[TaskGroup] = []
        self.retried_groups: list[GroupSpec] = []
        self._taken: set[str] = set()
        self.template_params: dict[str, str] = {}
        self._highest_number: dict[str, int] = {}
        self.callbacks: dict[str, Callback] = {}

    @property
    def group(self) -> str | None:
        return self.open_groups[-1].name if self.open_groups else None

    def claim_name(self, local: str, *, numbered: bool = False) -> str:
        """The full name for a new task or group. A duplicate is numbered as in Airflow, or refused."""
        if not isinstance(local, str) or not _LOCAL_NAME.fullmatch(local):
            raise refused(f"{local!r} is not a valid name for a task or group: use letters, digits, '_' and '-'.")
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

    def add(self, spec: TaskSpec, bound: BoundTask) -> TaskRef:
        position = len(self.specs)
        if position >= MAX_TASKS:
            raise refused(f"DAG {self.name!r} has more than {MAX_TASKS:,} tasks.")
        limited = [group for group in self.open_groups if group.max_active is not None]
        if limited and not spec.runs_nowhere:
            gates = [GateSpec(kind=GateKind.GROUP, name=group.name, capacity=group.max_active) for group in limited]
            spec = replace(spec, gates=(*gates, *spec.gates))
        self.specs.append(spec)
        self.bound.append(bound)
        self.upstream.append([])
        self.downstream.append([])
        for group in self.open_groups:
            group.members.append(position)
        return TaskRef(self, position, spec.name)

    def change(self, position: int, **fields: Any) -> None:
        self.specs[position] = replace(self.specs[position], **fields)

    def connect(self, up: TaskRef, down: TaskRef) -> None:
        for ref in (up, down):
            if ref.draft is not self:
                raise refused(
                    f"task {ref.name!r} belongs to DAG {ref.draft.name!r} and cannot be used in DAG {self.name!r}."
                )
        edge = (up.position, down.position)
        if edge in self.edges:
            return
        if len(self.edges) >= MAX_EDGES:
            raise refused(
                f"DAG {self.name!r} has more than {MAX_EDGES:,} dependencies; put a joining task between the groups."
            )
        self.edges.add(edge)
        self.upstream[down.position].append(up.position)
        self.downstream[up.position].append(down.position)


@contextmanager
def building(draft: DagBuilder) -> Iterator[None]:
    """Let the tasks that are called within the block become tasks of `draft`."""
    token = _drafting.set(draft)
    try:
        yield
    finally:
        _drafting.reset(token)


def current_builder(what: str, instead: str = "") -> DagBuilder:
    """The DAG whose function is running, or an error that names the call outside of one."""
    draft = _drafting.get()
    if draft is None:
        raise refused(f"{what} was used outside a DAG: use it in a function decorated with @dag{instead}.")
    return draft


def link(up: object, down: object) -> None:
    """Make every task in `down` depend on every task in `up`."""
    downs = list(_refs(down, edge_of_group="first"))
    for upper in _refs(up, edge_of_group="last"):
        for lower in downs:
            lower.draft.connect(upper, lower)


def _refs(side: object, *, edge_of_group: str) -> Iterator[TaskRef]:
    match side:
        case TaskRef():
            yield side
        case TaskGroup():
            yield from _ends(side, first=edge_of_group == "first")
        case Sequence() if not isinstance(side, str | bytes):
            for each in side:
                yield from _refs(each, edge_of_group=edge_of_group)
        case _:
            raise refused(
                f"{side!r} cannot be an operand of >> or <<: call the task first, as in `extract() >> load()`."
            )


def _ends(group: TaskGroup, *, first: bool) -> Iterator[TaskRef]:
    """The tasks of a group with no task of the group before them (first) or after them (last).

    Teardowns of a group are not among the last: tasks after the group do not wait for them.
    """
    draft = group.draft
    if draft is None or group in draft.open_groups:
        raise refused(f"task group {group.name!r} takes dependencies only after its `with` block.")
    if not group.members:
        raise refused(f"task group {group.name!r} has no tasks.")
    members = set(group.members)
    if not first and (workers := {each for each in members if not draft.specs[each].is_teardown}):
        members = workers
    neighbours = draft.upstream if first else draft.downstream
    for position in group.members:
        if position in members and members.isdisjoint(neighbours[position]):
            yield TaskRef(draft, position, draft.specs[position].name)
