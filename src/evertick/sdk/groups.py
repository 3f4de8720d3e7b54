"""`task_group`: a named part of a DAG. As a decorator it makes a function a group, which `.expand(...)` maps as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, Never, overload

from evertick.domain.dags.mapping import DEFAULT_INSTANCES, MapHow
from evertick.domain.dags.spec import MappedGroup
from evertick.sdk.builder import TaskGroup, first_tasks
from evertick.sdk.options import check_names
from evertick.sdk.runtime import GroupItem
from evertick.sdk.source_location import refused
from evertick.sdk.task import Expandable, Expansion, P, R, checked_lists, checked_rows


class GroupFunction(Expandable[R], Generic[P, R]):
    """The result of `@task_group` on a function: each call adds the group with its tasks to the DAG."""

    def __init__(self, function: Callable[P, R], name: str, max_active: int | None, retries: int) -> None:
        self.function, self.name = function, name
        self._max_active, self._retries = max_active, retries
        self.signature = inspect.signature(function)
        self.__doc__ = inspect.getdoc(function)

    def __repr__(self) -> str:
        return f"<task group {self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with TaskGroup(self.name, self._max_active, self._retries):
            return self.function(*args, **kwargs)

    def partial(self, *args: object, **kwargs: object) -> GroupPartial[R]:
        """The arguments shared by all indexes: `load.partial(table="x").expand(row=rows)`."""
        return GroupPartial(self, args, kwargs)

    def _given(self) -> GroupPartial[R]:
        return GroupPartial(self, (), {})

    def place(self, args: tuple[object, ...], kwargs: Mapping[str, object], expansion: Expansion) -> Any:
        """Add the group, which has an instance of each task per element. It returns what the function returns, or itself."""
        if self._retries:
            raise refused(f"task group {self.name!r} has retries and cannot be mapped: give its tasks retries instead.")
        lists, named = expansion.bound(), set(expansion.lists)
        group = TaskGroup(self.name, self._max_active)
        with group:
            given = self._bound(args, kwargs)
            items = {
                name: GroupItem(lists, name, parameter.default)
                for name, parameter in self.signature.parameters.items()
                if name in named or (None in named and name not in given)
            }
            result: Any = self.function(*args, **{**kwargs, **items})  # type: ignore[arg-type]
        builder = group.builder
        assert builder is not None
        builder.mapped_groups.append(MappedGroup(name=group.name, mapping=expansion.published(DEFAULT_INSTANCES)))
        for first in first_tasks(group):
            for source in expansion.sources:
                builder.connect(source, first)
        return group if result is None else result

    def _bound(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        return self.signature.bind_partial(*args, **kwargs).arguments


class GroupPartial(Expandable[R]):
    """A group function with the arguments shared by all indexes."""

    def __init__(self, group: GroupFunction[..., R], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._group, self._args, self._kwargs = group, args, kwargs
        self._check({}, is_partial=True)

    def __repr__(self) -> str:
        return f"<task group {self._group.name}, not expanded yet>"

    def _given(self) -> GroupPartial[R]:
        return self

    def over_dicts(self, rows: object) -> Any:
        checked = checked_rows(f"task group {self._group.name!r}", rows, self._check)
        return self._group.place(self._args, self._kwargs, Expansion(MapHow.KWARGS, {None: checked}))

    def over_lists(self, how: MapHow, lists: Mapping[str, object]) -> Any:
        checked = checked_lists(f"task group {self._group.name!r}", lists)
        self._check(lists)
        return self._group.place(self._args, self._kwargs, Expansion(how, checked))

    def _check(self, more: Mapping[str, object], *, is_partial: bool = False) -> None:
        signature = self._group.signature
        try:
            (signature.bind_partial if is_partial else signature.bind)(*self._args, **{**self._kwargs, **more})
        except TypeError as error:
            raise refused(f"wrong arguments for task group {self._group.name!r}: {error}.") from None


class NamedGroup(TaskGroup):
    """`with task_group("extract"):`, or a decorator with options."""

    def __call__(self, function: Callable[P, R]) -> GroupFunction[P, R]:
        return GroupFunction(function, self.local_name, self.max_active, self.retries)


@overload
def task_group(name: Callable[P, R], /) -> GroupFunction[P, R]: ...


@overload
def task_group(name: str, *, max_active: int | None = None, retries: int = 0, **unknown: Never) -> NamedGroup: ...


def task_group(
    name: str | Callable[..., Any], *, max_active: int | None = None, retries: int = 0, **unknown: Never
) -> Any:
    """Open a group of tasks with `with task_group("extract"):`, or make a function a group with `@task_group`. Groups can be
    nested.

    `max_active` limits how many of its tasks may be available or running at once in one run. `retries` is how often the whole
    group runs again after a failure; the tasks after it start once all of it has ended. A decorated function has `.expand(...)`:
    then the group has an instance of each task per element.
    """
    if callable(name):
        return GroupFunction(name, getattr(name, "__name__", "group"), None, 0)
    check_names(f"task group {name!r}", unknown, ("max_active", "retries"))
    return NamedGroup(name, max_active, retries)
