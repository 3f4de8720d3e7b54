"""J15 limits hold at every commit, by the moves of the tasks; J16 runs of one schedule do not overlap where they must not.

What tasks need is reckoned from the specs as published, not from what the program noted about who holds what.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from tests.chaos.case import TERMINAL, Case
from tests.chaos.evidence import PoolMove, RunMove, TaskId
from tests.chaos.verdict import Finding

Gate = tuple[str, str]  # kind, name

# From the line on: what may be claimed at any moment counts.
_HOLDING = frozenset({"available", "queued", "running"})
# Who wants a key for itself takes all of it.
_WHOLE_KEY = 1_000_000
_ALLOW = "allow"
# How many open runs of its schedule a new one may find.
_MOST_BESIDE = {"skip": 0, "queue_one": 1}


def j15(case: Case, finding: Finding) -> None:
    """Whenever somebody is let in, what is held fits: pools as large as they are then, keys, limits of tasks and DAGs."""
    for text in case.evidence.limits_broken:
        finding.violated("limit_drift", text)
    pools: dict[str, int] = {}
    used: Counter[Gate] = Counter()
    held: dict[TaskId, list[tuple[Gate, int]]] = {}
    for event in sorted((*case.evidence.task_moves, *case.evidence.pool_moves), key=lambda each: each.entry):
        if isinstance(event, PoolMove):
            pools[event.name] = event.capacity
            continue
        if event.new_state not in _HOLDING:
            for gate, weight in held.pop(event.task, []):
                used[gate] -= weight
        elif event.old_state not in _HOLDING:
            held[event.task] = taken = []
            for gate, weight, capacity in _needs(case, event.task, pools):
                finding.looked_at(f"entries by {gate[0]}")
                taken.append((gate, weight))
                used[gate] += weight
                if used[gate] > capacity:
                    finding.violated(
                        "overfull",
                        f"{case.told(event.task)} was let in to {gate[0]} {gate[1]}: {used[gate]} of {capacity} are held",
                        entry=event.entry,
                    )


def _needs(case: Case, task: TaskId, pools: Mapping[str, int]) -> Iterator[tuple[Gate, int, int]]:
    """The gates of a task with their full names, what it takes of each, and how much there is."""
    run = case.runs.get(task[0])
    plan = case.evidence.plans.get((run.version_id, task[1])) if run is not None else None
    if run is None or plan is None:
        return
    found: dict[Gate, tuple[int, int]] = {}
    for need in plan.needs:
        names = {"group": f"{run.run_id}/{need.name}", "task": f"{run.dag}::{plan.name}"}
        gate = (need.kind, names.get(need.kind) or _filled(need.name, run.params))
        capacity = pools.get(need.name, 0) if need.kind == "pool" else need.capacity or _WHOLE_KEY
        found[gate] = (max(need.weight, found.get(gate, (0, 0))[0]), capacity)
    for gate, (weight, capacity) in found.items():
        yield gate, weight, capacity


def _filled(template: str, params: Mapping[str, Any]) -> str:
    """The key with the run's parameters. The suite's keys name parameters of one level, and no braces of their own."""
    return re.sub(r"\{params\.(\w+)\}", lambda found: str(params.get(found[1])), template)


def j16(case: Case, finding: Finding) -> None:
    """But for `allow`, one run of a schedule is active at a time, and only what would overlap is skipped for that."""
    policies = _policies(case)
    schedule_of = {
        run.run_id: run.schedule_id
        for run in case.evidence.runs
        if run.schedule_id is not None and run.schedule_id in policies
    }
    open_runs: dict[int, dict[int, str]] = defaultdict(dict)
    opened: dict[int, list[RunMove]] = defaultdict(list)
    closed: dict[int, datetime] = {}
    for move in sorted(case.evidence.run_moves, key=lambda each: each.entry):
        schedule = schedule_of.get(move.run_id)
        if schedule is None:
            continue
        beside = {run: state for run, state in open_runs[schedule].items() if run != move.run_id}
        if move.old_state is None:
            finding.looked_at(f"runs of {policies[schedule]}")
            opened[schedule].append(move)
            if len(beside) > _MOST_BESIDE.get(policies[schedule], len(beside)):
                finding.violated(
                    "ran_beside",
                    f"schedule {schedule} ({policies[schedule]}) got run {move.run_id} beside {sorted(beside)}",
                )
        if move.new_state == "running" and "running" in beside.values():
            finding.violated(
                "runs_overlap",
                f"schedule {schedule} ({policies[schedule]}): run {move.run_id} began beside {sorted(beside)}",
            )
        if move.new_state in TERMINAL:
            open_runs[schedule].pop(move.run_id, None)
            closed[move.run_id] = move.at
        elif move.new_state is not None:
            open_runs[schedule][move.run_id] = move.new_state
            closed.pop(move.run_id, None)
    _judge_skips(case, finding, opened, closed)


def _policies(case: Case) -> dict[int, str]:
    """Of schedules that had one policy all the time, and not `allow`."""
    found: dict[int, set[str]] = defaultdict(set)
    for version in case.evidence.schedule_versions:
        found[version.schedule_id].add(version.overlap)
    return {schedule: next(iter(each)) for schedule, each in found.items() if len(each) == 1 and _ALLOW not in each}


def _judge_skips(case: Case, finding: Finding, opened: dict[int, list[RunMove]], closed: dict[int, datetime]) -> None:
    """Whoever skips because of a run must have had one open. What `cancel` skips gives way to a newer fire instead."""
    slack = timedelta(seconds=case.limits.edit_seconds)
    for skip in case.evidence.skips:
        if skip.reason not in ("overlap_skip", "overlap_queue_one"):
            continue
        finding.looked_at("fires skipped for an open run", skip.total)
        moves = sorted(opened.get(skip.schedule_id, []), key=lambda move: move.at)
        until = bisect_right(moves, skip.recorded_at + slack, key=lambda move: move.at)
        if not any(closed.get(m.run_id, skip.recorded_at) >= skip.recorded_at - slack for m in moves[:until]):
            finding.violated(
                "skipped_alone",
                f"schedule {skip.schedule_id}: {skip.total} fires until {skip.last_at} skipped as {skip.reason},"
                " and no run of it was open",
            )
