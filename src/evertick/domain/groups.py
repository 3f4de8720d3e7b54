"""Groups of tasks that run again as a whole when they fail: who is in one, whose failure is its own, what cannot be one."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from evertick.domain.branching import below
from evertick.domain.dag import Choice, DagSpec
from evertick.domain.setups import leaves

MAX_GROUP_RETRIES = 100


def groups_of(spec: DagSpec) -> list[int | None]:
    """For each task the place of its group in `spec.groups`; None where no group with retries is around it."""
    named = {group.name: number for number, group in enumerate(spec.groups)}
    known: dict[str | None, int | None] = {None: None}
    for name in {task.group for task in spec.tasks if task.group} if named else ():
        parts = name.split(".")
        around = (named.get(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))
        known[name] = next((each for each in around if each is not None), None)
    return [known.get(task.group) for task in spec.tasks]


def group_leaves(spec: DagSpec) -> set[int]:
    """The tasks whose failure is that of their group: the last ones within it, as the leaves of a DAG are for a run."""
    of = groups_of(spec)
    return {
        idx
        for idx in leaves(spec, [(up, down) for up, down in spec.edges if of[up] == of[down]])
        if of[idx] is not None
    }


def check_groups(spec: DagSpec) -> Iterator[str]:
    """What would wait for itself, or for nothing. The edges are those of the spec, without a cycle."""
    of = groups_of(spec)
    for number, group in enumerate(spec.groups):
        members = {idx for idx, each in enumerate(of) if each == number}
        around = [each.name for each in spec.groups if group.name.startswith(f"{each.name}.")]
        if (
            isinstance(group.retries, bool)
            or not isinstance(group.retries, int)
            or not 1 <= group.retries <= MAX_GROUP_RETRIES
        ):
            yield f"group {group.name!r}: retries is {group.retries!r}; a group may begin again 1 to {MAX_GROUP_RETRIES} times."
        elif around:
            yield f"group {group.name!r} has retries and stands in {around[0]!r}, which has retries, too: give them to one."
        elif not members:
            yield f"group {group.name!r} has retries and no tasks."
        else:
            yield from _check_one(spec, group.name, members)
    if waits := _between(spec, of):
        yield (
            f"group {spec.groups[waits[0]].name!r} has retries, so nothing outside hears of it before all of it has ended; but"
            f" {spec.tasks[waits[1]].name!r}, outside of it, comes after one of its tasks and before another: put it in, too."
        )


def _check_one(spec: DagSpec, name: str, members: Collection[int]) -> Iterator[str]:
    for idx in members:
        task = spec.tasks[idx]
        if task.choice is None:
            continue
        after = (
            {down for up, down in spec.edges if up == idx}
            if task.choice is not Choice.SHORT_CIRCUIT
            else below(spec, [idx])
        )
        if outside := sorted(
            spec.tasks[each].name for each in after - set(members) if not spec.tasks[each].is_teardown
        ):
            yield (
                f"group {name!r} has retries, and its task {task.name!r} may skip tasks outside of it"
                f" ({', '.join(outside[:5])}), which could not be taken back: put them into the group, or the choice out of it."
            )


def _between(spec: DagSpec, of: list[int | None]) -> tuple[int, int] | None:
    """A group, and a task outside that both waits for it and is waited for by it."""
    # Each group as one: tasks outside are themselves, those within are -1, -2, ...
    one = [idx if group is None else -1 - group for idx, group in enumerate(of)]
    after: dict[int, set[int]] = {}
    for up, down in spec.edges:
        if one[up] != one[down]:
            after.setdefault(one[up], set()).add(one[down])
    for number in range(len(spec.groups)):
        seen: dict[int, int] = {}
        rest = [(each, each) for each in after.get(-1 - number, ())]
        while rest:
            each, first = rest.pop()
            if each == -1 - number:
                return number, first if first >= 0 else one.index(first)
            if each not in seen:
                seen[each] = first
                rest += [(down, first) for down in after.get(each, ())]
    return None
