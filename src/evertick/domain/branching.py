"""Which tasks a branch or a short-circuit skips, given its return value. A pure decision, applied when the task ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.dag import Choice, DagSpec
from evertick.domain.errors import BadChoice


def judge(spec: DagSpec, outcome: Outcome) -> Outcome:
    """A success with the tasks it skips; a failure if the result names nothing that can be followed."""
    choice = spec.tasks[outcome.key.idx].choice
    if choice is None or outcome.kind is not OutcomeKind.SUCCESS:
        return outcome
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
        case Choice.BRANCH:
            chosen = _chosen(spec, idx, value, direct)
            # A task that also follows a chosen task is not skipped here: its trigger rule decides.
            return sorted(set(direct) - chosen - below(spec, chosen))
        case Choice.SHORT_CIRCUIT:
            return [] if value else sorted(each for each in below(spec, [idx]) if not spec.tasks[each].is_teardown)
        case Choice.SHORT_CIRCUIT_DIRECT:
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
