"""The model of a forecast: what is open and due, what it takes, and what it may use. Plain records without I/O.

Times are seconds from the instant of the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# A task without any history, and without that of its DAG.
UNKNOWN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskModel:
    """A task of a version. `durations`: of past ones that succeeded. `skip_share`: how often it did not run;
    `instances`: how many it is replaced by, on average. `gates`: names with the slots that it holds."""

    name: str
    queue: str = "default"
    rank: int = 0
    needs_slot: bool = True
    gates: tuple[tuple[str, int], ...] = ()
    durations: tuple[float, ...] = ()
    skip_share: float = 0.0
    instances: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionModel:
    dag: str
    dag_id: int = 0
    tasks: tuple[TaskModel, ...]
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProgress:
    """The instances of a task of an open run. `elapsed`: how long each running one has run. `wakes_in`: when the
    instances that wait for a time continue. `order`: the place of the first one in its queue."""

    ended: int = 0
    elapsed: tuple[float, ...] = ()
    waiting: int = 0
    wakes_in: float | None = None
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """An open run (`run_id`), or one that will begin. `due`: when it is or was due; `deadline`: by when it must end.
    `progress`: of its tasks by index; one without is waiting. A paused run does not move."""

    version: VersionModel
    run_id: int | None = None
    schedule: str | None = None
    due: float = 0.0
    begins: float = 0.0
    is_started: bool = False
    is_paused: bool = False
    deadline: float | None = None
    progress: Mapping[int, TaskProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerModel:
    """The slots of runners that serve the same queues."""

    queues: tuple[str, ...]
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`gates`: the slots of each gate. `active_limits`: how many runs of a DAG may run at once."""

    runs: tuple[RunModel, ...]
    runners: tuple[RunnerModel, ...]
    gates: Mapping[str, int] = field(default_factory=dict)
    active_limits: Mapping[str, int] = field(default_factory=dict)


def with_slots(snapshot: Snapshot, more: Mapping[str, int]) -> Snapshot:
    """What if there were more, or fewer, slots for the tasks of a queue?"""
    runners = list(snapshot.runners)
    for queue, slots in more.items():
        place = next((n for n, each in enumerate(runners) if queue in each.queues), None)
        if place is None:
            runners.append(RunnerModel(queues=(queue,), slots=max(0, slots)))
        else:
            runners[place] = replace(runners[place], slots=max(0, runners[place].slots + slots))
    return replace(snapshot, runners=tuple(runners))


def with_pools(snapshot: Snapshot, pools: Mapping[str, int]) -> Snapshot:
    """What if these pools had other sizes?"""
    return replace(snapshot, gates={**snapshot.gates, **{pool_key(name): slots for name, slots in pools.items()}})


def pool_key(name: str) -> str:
    return f"pool {name}"
