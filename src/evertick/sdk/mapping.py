"""`.expand(...)`: a task with one instance per element of its lists. Lists in the code are not part of the spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from evertick.domain.dags.mapping import MapHow, MappedList
from evertick.domain.dags.mapping import Mapping as TaskMapping
from evertick.sdk.builder import TaskRef
from evertick.sdk.runtime import ListArgument
from evertick.sdk.source_location import refused

_EXAMPLE = "as in .expand(x=[1, 2, 3]) or .expand(x=other_task())"


class Expansion(NamedTuple):
    """The lists to expand over, by argument. A single list of dicts with all arguments has no argument name."""

    how: MapHow
    lists: Mapping[str | None, object]

    @property
    def sources(self) -> list[TaskRef]:
        return [each for each in self.lists.values() if isinstance(each, TaskRef)]

    def published(self, most: int) -> TaskMapping:
        return TaskMapping(how=self.how, lists=tuple(_published(*each) for each in self.lists.items()), most=most)

    def bound(self) -> tuple[ListArgument, ...]:
        return tuple(
            ListArgument(name, None if isinstance(each, TaskRef) else tuple(each))  # type: ignore[arg-type]
            for name, each in self.lists.items()
        )


Place = Callable[[tuple[object, ...], Mapping[str, object], Expansion | None], TaskRef]


class Partial:
    """A task with the arguments shared by all its instances: `load.partial(table="x").expand(row=rows)`."""

    def __init__(
        self,
        name: str,
        signature: inspect.Signature,
        place: Place,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self.name, self._signature, self._place = name, signature, place
        self._args, self._kwargs = args, dict(kwargs or {})
        try:
            self._signature.bind_partial(*args, **self._kwargs)
        except TypeError as error:
            raise refused(f"task {name!r} cannot be called like this: {error}.") from None

    def __repr__(self) -> str:
        return f"<task {self.name}, not expanded yet>"

    def expand(self, **lists: object) -> TaskRef:
        """One instance per element; with several lists, one per combination: the last list varies fastest."""
        return self._expanded(MapHow.PRODUCT, lists)

    def expand_zip(self, **lists: object) -> TaskRef:
        """One instance per position of the lists, which must have equal length."""
        return self._expanded(MapHow.ZIP, lists)

    def expand_kwargs(self, rows: object, /) -> TaskRef:
        """One instance per dict of a list, called with the dict as its arguments."""
        checked = _checked_list(self.name, "expand_kwargs", rows)
        for row in () if isinstance(checked, TaskRef) else checked:
            if not isinstance(row, Mapping) or not all(isinstance(key, str) for key in row):
                raise refused(
                    f"task {self.name!r}: expand_kwargs takes a list of dicts of arguments, but it contains {row!r}."
                )
            self._check(row)
        return self._place(self._args, self._kwargs, Expansion(MapHow.KWARGS, {None: checked}))

    def _expanded(self, how: MapHow, lists: Mapping[str, object]) -> TaskRef:
        if not lists:
            raise refused(f"task {self.name!r} expands over nothing: give it at least one list, {_EXAMPLE}.")
        checked: dict[str | None, object] = {name: _checked_list(self.name, name, each) for name, each in lists.items()}
        self._check(lists)
        return self._place(self._args, self._kwargs, Expansion(how, checked))

    def _check(self, more: Mapping[str, object]) -> None:
        if twice := sorted(self._kwargs.keys() & more.keys()):
            raise refused(f"task {self.name!r} gets argument {twice[0]!r} twice: by partial and by expand.")
        wanted = {"context": None} if "context" in self._signature.parameters and "context" not in self._kwargs else {}
        try:
            self._signature.bind(*self._args, **{**wanted, **self._kwargs, **more})
        except TypeError as error:
            raise refused(f"task {self.name!r} cannot be called like this: {error}.") from None


def _published(name: str | None, each: object) -> MappedList:
    if isinstance(each, TaskRef):
        return MappedList(argument=name, task=each.name)
    return MappedList(argument=name, length=len(each))  # type: ignore[arg-type]


def _checked_list(task: str, argument: str, given: object) -> TaskRef | list[object]:
    if isinstance(given, TaskRef):
        if given.path:
            raise refused(f"task {task!r}: {argument} is a part of a result; let a task return the list itself.")
        return given
    if isinstance(given, Mapping):
        raise refused(
            f"task {task!r}: {argument} is a dict; expand over list({argument}.items()) or its keys or values."
        )
    if not isinstance(given, list | tuple | range):
        raise refused(f"task {task!r}: {argument} must be a list or the result of a task, not {given!r}; {_EXAMPLE}.")
    if any(isinstance(each, TaskRef) for each in given):
        raise refused(
            f"task {task!r}: {argument} is a list that contains results of tasks; let one task return the whole list."
        )
    return list(given)
