"""Groups of tasks that run again as a whole when they fail: their members, their leaves, and the checks on them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from evertick.domain.branching import below
from evertick.domain.dag import Choice, DagSpec
from evertick.domain.setups import leaves

MAX_GROUP_RETRIES = 100


def groups_of(spec: DagSpec) -> list[int | None]:
    """For each task the index of its group in `spec.groups`; None for a task without a retried group around it."""
    named = {group.name: number for number, group in enumerate(spec.groups)}
    known: dict[str | None, int | None] = {None: None}
    for name in {task.group for task in spec.tasks if task.group} if named else ():
        parts = name.split(".")
        around = (named.get(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))
        known[name] = next((each for each in around if each is not None), None)
    return [known.get(task.group) for task in spec.tasks]


def group_leaves(spec: DagSpec) -> set[int]:
    """The tasks whose failure fails their group: its last tasks, like the leaves of a DAG for a run."""
    of = groups_of(spec)
    return {
        idx
        for idx in leaves(spec, [(up, down) for up, down in spec.edges if of[up] == of[down]])
        if of[idx] is not None
    }


def check_groups(spec: DagSpec) -> Iterator[str]:
    """Errors for groups that would wait for themselves or for nothing. The edges of `spec` must form no cycle."""
    of = groups_of(spec)
    for number, group in enumerate(spec.groups):
        members = {idx for idx, each in enumerate(of) if each == number}
        around = [each.name for each in spec.groups if group.name.startswith(f"{each.name}.")]
        if (
            isinstance(group.retries, bool)
            or not isinstance(group.retries, int)
            or not 1 <= group.retries <= MAX_GROUP_RETRIES
        ):
            yield f"group {group.name!r}: retries is {group.retries!r}; a group can be retried 1 to {MAX_GROUP_RETRIES} times."
        elif around:
            yield f"group {group.name!r} has retries and is inside {around[0]!r}, which has retries too: keep one of them."
        elif not members:
            yield f"group {group.name!r} has retries and no tasks."
        else:
            yield from _check_one(spec, group.name, members)
    if waits := _between(spec, of):
        yield (
            f"group {spec.groups[waits[0]].name!r} has retries, so tasks outside it wait until all of it has ended; but"
            f" {spec.tasks[waits[1]].name!r}, outside it, runs between two of its tasks: move that task into the group."
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
                f"group {name!r} has retries, and its task {task.name!r} can skip tasks outside it"
                f" ({', '.join(outside[:5])}), which a retry could not undo: move them into the group, or the branch out of it."
            )


def _between(spec: DagSpec, of: list[int | None]) -> tuple[int, int] | None:
    """A group, and a task outside it that is both downstream and upstream of the group."""
    # Each group is one node: tasks outside keep their index, groups are -1, -2, ...
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
