"""Setup and teardown: which tasks decide the state of a run, and which are cleared together. Pure functions of a DAG."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from evertick.domain.branching import below
from evertick.domain.dag import DagSpec


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
    if not any(task.is_setup for task in spec.tasks):
        return set()
    found: set[int] = set()
    for setup in (idx for idx, task in enumerate(spec.tasks) if task.is_setup):
        under = below(spec, [setup])
        teardowns = {down for up, down in spec.edges if up == setup and spec.tasks[down].is_teardown}
        for idx in under.intersection(idxs):
            mine = teardowns & below(spec, [idx])
            if not spec.tasks[idx].is_teardown and (mine or not teardowns):
                found |= {setup, *mine}
    return found
