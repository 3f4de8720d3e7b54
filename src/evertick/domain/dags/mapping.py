"""Dynamic mapping as published: over which lists a task expands, and how. The content of the lists is not known here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, product
from math import prod
from typing import NamedTuple

from evertick.domain.dags.params import JsonValue
from evertick.domain.states import TriggerRule

DEFAULT_INSTANCES = 10_000
MOST_INSTANCES = 100_000
# The key under which an instance's inputs hold its mapped arguments: no task can have this name.
ITEM = ""
# Trigger rules that may start a task before the result that it expands over exists.
HASTY_RULES = frozenset({TriggerRule.ALWAYS, TriggerRule.ONE_SUCCESS, TriggerRule.ONE_FAILED, TriggerRule.ONE_DONE})


class MapHow(StrEnum):
    """Every combination of the lists, a zip of their elements, or one list of dicts with all arguments."""

    PRODUCT = "product"
    ZIP = "zip"
    KWARGS = "kwargs"


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedList:
    """One list of a mapped task: its argument, and either the task that returns it, its length in the code, or how its length
    follows from results of tasks: `{"task": name}`, or `{"sum": [...]}`, "min" or "max" of such lengths."""

    argument: str | None = None
    task: str | None = None
    length: int | None = None
    size: Dict[str, JsonValue] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        return (self.task,) if self.task is not None else tuple(_tasks_of(self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """How a task becomes its instances; `most` bounds their number."""

    how: MapHow = MapHow.PRODUCT
    lists: tuple[MappedList, ...]
    most: int = DEFAULT_INSTANCES


def check_mapping(mapping: Mapping, *, rule: TriggerRule, upstream: Collection[str]) -> Iterator[str]:
    """Every problem that can be known before a run."""
    if not mapping.lists:
        yield "it expands over nothing; give it at least one list, as in task.expand(x=[1, 2, 3])."
    if isinstance(mapping.most, bool) or not isinstance(mapping.most, int) or not 1 <= mapping.most <= MOST_INSTANCES:
        yield f"max_instances is {mapping.most!r}; it must be from 1 to {MOST_INSTANCES:,}."
        return
    lengths = [each.length for each in mapping.lists if each.length is not None]
    if mapping.how is MapHow.ZIP and len(set(lengths)) > 1:
        yield f"expand_zip takes lists of equal length, not of {', '.join(map(str, lengths))}."
    planned = prod(lengths) if mapping.how is MapHow.PRODUCT else max(lengths, default=0)
    if planned > mapping.most:
        yield (
            f"it expands to {planned:,} instances, and at most {mapping.most:,} are allowed;"
            " shorten the lists, or raise max_instances."
        )
    for name in (name for each in mapping.lists for name in each.tasks):
        if name not in upstream:
            yield f"it expands over the result of {name!r}, which is not upstream of it."
        if rule in HASTY_RULES:
            yield f"it expands over the result of {name!r}, but trigger rule {rule} may start it before that task has ended."


def _tasks_of(size: Dict[str, JsonValue]) -> Iterator[str]:
    for key, value in size.items():
        if key == "task":
            yield str(value)
        for part in value if isinstance(value, list) else ():
            yield from _tasks_of(part)  # type: ignore[arg-type]


class Items(NamedTuple):
    """The arguments of each instance, or how the task ends instead, and why."""

    items: list[list[object]]
    instead: str | None = None
    reason: str = ""


def items_of(mapping: Mapping, result_of: Callable[[str], object], end_of: Callable[[str], str | None]) -> Items:
    """The decision of `lists_of` and `count_instances` in the database, from the results and end states of the tasks that it
    expands over: a mapped task without instances ended as a whole, the others have no end state of their own."""
    lists: list[list[object]] = []
    for each in mapping.lists:
        if each.task is None:
            lists.append(list(range(each.length or 0)))
            continue
        if end_of(each.task) == "skipped":
            return Items([], "skipped", f"nothing to expand over: task {each.task} was skipped")
        value = result_of(each.task)
        if end_of(each.task) not in (None, "success") or not isinstance(value, list):
            return _failed(f"cannot expand over the result of task {each.task}: it is not a list")
        if mapping.how is MapHow.KWARGS and not all(isinstance(row, dict) for row in value):
            return _failed(f"cannot expand over the result of task {each.task}: not all of its elements are dicts")
        lists.append(value)
    sizes = {len(each) for each in lists}
    if sizes == {0} or (mapping.how is MapHow.PRODUCT and 0 in sizes):
        return Items([], "skipped", "nothing to expand over: the list is empty")
    if mapping.how is MapHow.ZIP and len(sizes) > 1:
        return _failed("cannot expand lists side by side: they differ in length")
    every = product(*lists) if mapping.how is MapHow.PRODUCT else zip(*lists, strict=True)
    items = [list(item) for item in islice(every, mapping.most + 1)]
    if len(items) > mapping.most:
        return _failed(f"expands to more than the {mapping.most:,} instances that are allowed; raise max_instances")
    return Items(items)


def _failed(reason: str) -> Items:
    return Items([], "failed", reason)
