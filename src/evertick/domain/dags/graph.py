"""Decisions on a DAG's graph: tasks that a branch skips, setups that a clear includes, and groups with retries.

Pure: the database applies each decision when a task ends.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.dags.gates import GateKind
from evertick.domain.dags.mapping import Mapping, check_mapping
from evertick.domain.dags.spec import BranchChoice, DagSpec, MappedGroup, TaskSpec
from evertick.domain.errors import BadChoice
from evertick.domain.states import TriggerRule


def judge(spec: DagSpec, outcome: Outcome) -> Outcome:
    """A success with the tasks it skips; a failure if the result names nothing that can be followed."""
    choice = spec.tasks[outcome.key.idx].choice
    if outcome.kind is not OutcomeKind.SUCCESS:
        return outcome
    if choice is None:
        named = set(outcome.skip_names)
        skips = (position for position, task in enumerate(spec.tasks) if task.name in named) if named else ()
        return replace(outcome, skips=tuple(skips))
    value = json.loads(outcome.result_json) if outcome.result_json is not None else None
    try:
        return replace(outcome, skips=tuple(skipped_by(spec, outcome.key.idx, value)))
    except BadChoice as error:
        return replace(outcome, kind=OutcomeKind.FAILED, reason=str(error), result_json=None, no_retry=True)


def skipped_by(spec: DagSpec, idx: int, value: object) -> list[int]:
    """The tasks skipped because task `idx` returned `value`."""
    task = spec.tasks[idx]
    direct = [down for up, down in spec.edges if up == idx and not spec.tasks[down].is_teardown]
    match task.choice:
        case None:
            return []
        case BranchChoice.BRANCH:
            chosen = _chosen(spec, idx, value, direct)
            # A task that also follows a chosen task is not skipped here: its trigger rule decides.
            return sorted(set(direct) - chosen - below(spec, chosen))
        case BranchChoice.SHORT_CIRCUIT:
            return [] if value else sorted(each for each in below(spec, [idx]) if not spec.tasks[each].is_teardown)
        case BranchChoice.SHORT_CIRCUIT_DIRECT:
            return [] if value else sorted(direct)


def below(spec: DagSpec, idxs: Iterable[int]) -> set[int]:
    """All tasks downstream of the given tasks."""
    after: dict[int, list[int]] = {}
    for up, down in spec.edges:
        after.setdefault(up, []).append(down)
    found: set[int] = set()
    rest = list(idxs)
    while rest:
        for down in after.get(rest.pop(), ()):
            if down not in found:
                found.add(down)
                rest.append(down)
    return found


def _chosen(spec: DagSpec, idx: int, value: object, direct: Sequence[int]) -> set[int]:
    names = [] if value is None else value if isinstance(value, list) else [value]
    chosen: set[int] = set()
    for name in names:
        found = {each for each in direct if isinstance(name, str) and _is_called(spec, each, name)}
        if not found:
            can = ", ".join(spec.tasks[each].name for each in direct) or "nothing"
            raise BadChoice(
                f"branch {spec.tasks[idx].name} returned {name!r}, which is not a task or group directly downstream of it;"
                f" return one of {can}, or None"
            )
        chosen |= found
    return chosen


def _is_called(spec: DagSpec, idx: int, name: str) -> bool:
    """Whether `name` is the task's own name or that of an enclosing group."""
    task = spec.tasks[idx]
    return name == task.name or (task.group is not None and f"{task.group}.".startswith(f"{name}."))


def leaves(spec: DagSpec, edges: Iterable[tuple[int, int]] | None = None) -> set[int]:
    """The tasks whose failure fails the run: the last ones (by `edges`), except teardowns that do not affect the run's state."""
    is_ignored = [task.is_teardown and not task.fails_run for task in spec.tasks]
    followed: set[int] = set()
    for up, down in sorted(spec.edges if edges is None else edges, reverse=True):  # tasks are in topological order
        if not is_ignored[down] or down in followed:
            followed.add(up)
    return {idx for idx, ignored in enumerate(is_ignored) if not ignored and idx not in followed}


def cleared_with(spec: DagSpec, idxs: Collection[int]) -> set[int]:
    """The tasks that must run again with these: the setups that they depend on, and the teardowns of those setups.

    A task depends on an upstream setup if a teardown of that setup is downstream of the task or the setup has none.
    """
    found: set[int] = set()
    for setup in (idx for idx, task in enumerate(spec.tasks) if task.is_setup):
        under = below(spec, [setup])
        teardowns = {down for up, down in spec.edges if up == setup and spec.tasks[down].is_teardown}
        for idx in under.intersection(idxs):
            mine = teardowns & below(spec, [idx])
            if not spec.tasks[idx].is_teardown and (mine or not teardowns):
                found |= {setup, *mine}
    return found


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


def map_heads(spec: DagSpec) -> list[int | None]:
    """For each task of a mapped group the position of the group's first task, which none of the group precedes."""
    found: list[int | None] = [None] * len(spec.tasks)
    for group in spec.mapped_groups:
        members = [idx for idx, task in enumerate(spec.tasks) if _is_inside(task, group)]
        for idx in members:
            found[idx] = members[0]
    return found


def _is_inside(task: TaskSpec, group: MappedGroup) -> bool:
    return task.group is not None and f"{task.group}.".startswith(f"{group.name}.")


def mapping_at(spec: DagSpec, idx: int) -> Mapping | None:
    """How the task at this position expands: by itself, or with its group."""
    groups = (group.mapping for group in spec.mapped_groups if _is_inside(spec.tasks[idx], group))
    return spec.tasks[idx].mapping or next(groups, None)


def check_mapped_groups(spec: DagSpec) -> Iterator[str]:
    """Errors of mapped groups that can be known before a run."""
    for group in spec.mapped_groups:
        members = {idx for idx, task in enumerate(spec.tasks) if _is_inside(task, group)}
        tasks = [spec.tasks[idx] for idx in sorted(members)]
        around = [each.name for each in spec.mapped_groups if group.name.startswith(f"{each.name}.")]
        retried = [each.name for each in spec.groups if f"{each.name}.".startswith(f"{group.name}.")]
        if not tasks:
            yield f"group {group.name!r} is mapped and has no tasks."
        if around:
            yield f"group {group.name!r} is mapped and is inside {around[0]!r}, which is mapped too: keep one of them."
        if retried:
            yield f"group {retried[0]!r} has retries and is mapped: give its tasks retries instead."
        for task in tasks:
            if task.mapping is not None or task.is_setup or task.is_teardown or task.runs_nowhere:
                what = "mapped" if task.mapping else "a setup or teardown" if not task.runs_nowhere else "a wait"
                yield f"task {task.name!r} is {what} and cannot be in the mapped group {group.name!r}."
            if any(gate.kind is GateKind.ORDER for gate in task.gates):
                yield f"task {task.name!r} is in a mapped group: `order` is not allowed there."
        above = {idx: {up for up, down in spec.edges if down == idx} for idx in sorted(members)}
        roots = [{spec.tasks[up].name for up in ups} for ups in above.values() if ups.isdisjoint(members)]
        # Any of them may be the first one, whose row waits for the lists.
        shared = set.intersection(*roots) if roots else set()
        for problem in check_mapping(group.mapping, rule=TriggerRule.ALL_SUCCESS, upstream=shared):
            yield f"group {group.name!r}: {problem}"


def group_leaves(spec: DagSpec) -> set[int]:
    """The tasks whose failure fails their group: its last tasks, like the leaves of a DAG for a run."""
    of = groups_of(spec)
    inside = [(up, down) for up, down in spec.edges if of[up] == of[down]]
    return {idx for idx in leaves(spec, inside) if of[idx] is not None}


def check_groups(spec: DagSpec) -> Iterator[str]:
    """Errors for groups that would wait for themselves or for nothing. The edges of `spec` must form no cycle."""
    of = groups_of(spec)
    for number, group in enumerate(spec.groups):
        members = {idx for idx, each in enumerate(of) if each == number}
        around = [each.name for each in spec.groups if group.name.startswith(f"{each.name}.")]
        retries = group.retries
        if isinstance(retries, bool) or not isinstance(retries, int) or not 1 <= retries <= MAX_GROUP_RETRIES:
            yield f"group {group.name!r}: retries is {retries!r}; a group can be retried 1 to {MAX_GROUP_RETRIES} times."
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
        is_whole = task.choice is BranchChoice.SHORT_CIRCUIT
        after = below(spec, [idx]) if is_whole else {down for up, down in spec.edges if up == idx}
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
