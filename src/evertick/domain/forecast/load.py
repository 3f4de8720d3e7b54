"""The load of the next hours against the slots: how many slot-seconds are needed in each, and what is left over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evertick.domain.forecast.model import UNKNOWN_SECONDS, RunModel, Snapshot, TaskModel

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HourLoad:
    """`needed`: the slots that the runs of that hour need on average; `used`: the slots in use, with what the hours
    before left over; `backlog`: the slot-hours that are left at its end; `slots`: all of them."""

    hour: int
    needed: float
    used: float
    backlog: float
    slots: int


def load_of(snapshot: Snapshot, hours: int) -> dict[str, list[HourLoad]]:
    """By queue. A runner that serves several queues counts for each."""
    needed: dict[str, list[float]] = {}
    for run in snapshot.runs:
        hour = int(max(0.0, run.begins) // HOUR)
        if hour < hours and not run.is_paused:
            for queue, seconds in _work(run):
                needed.setdefault(queue, [0.0] * hours)[hour] += seconds / HOUR
    slots = {
        queue: sum(each.slots for each in snapshot.runners if queue in each.queues)
        for queue in {*needed, *(queue for each in snapshot.runners for queue in each.queues)}
    }
    return {queue: _hours(needed.get(queue, [0.0] * hours), slots[queue]) for queue in sorted(slots)}


def _hours(needed: list[float], slots: int) -> list[HourLoad]:
    found, backlog = [], 0.0
    for hour, more in enumerate(needed):
        waiting = backlog + more
        used = min(float(slots), waiting)
        backlog = waiting - used
        found.append(HourLoad(hour=hour, needed=more, used=used, backlog=backlog, slots=slots))
    return found


def _work(run: RunModel) -> Iterable[tuple[str, float]]:
    for idx, task in enumerate(run.version.tasks):
        if not task.needs_slot:
            continue
        progress = run.progress.get(idx)
        mean = mean_seconds(task)
        if progress is None:
            yield task.queue, mean * task.instances * (1 - task.skip_share)
        else:
            yield task.queue, sum(max(mean - each, mean / 10) for each in progress.elapsed) + mean * progress.waiting


def mean_seconds(task: TaskModel) -> float:
    return sum(task.durations) / len(task.durations) if task.durations else UNKNOWN_SECONDS
