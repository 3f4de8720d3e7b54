"""The forecast: a discrete-event simulation of the open and due runs over a snapshot, repeated with other durations.

Each repetition draws the durations of tasks from those of past attempts, as if they had been observed once more
(a bootstrap): the spread of its results is that of the durations and of the uncertainty about them. Pure, and fast enough
for 10,000 waiting tasks: one repetition is a loop over a heap with plain lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from evertick.domain.forecast.model import UNKNOWN_SECONDS, RunModel, Snapshot, TaskModel, TaskProgress
from evertick.domain.monitoring.quantiles import quantile

# As many repetitions as fit into about 40,000 simulated tasks.
EFFORT = 40_000
FEWEST, MOST = 4, 40
LOW, HIGH = 0.1, 0.9
# The 90th percentile of a normal distribution.
_Z = 1.2816
# Below this number of repetitions, the band is that of a normal distribution with their mean and deviation.
_ENOUGH = 20
_NEVER = math.inf
_FINISH, _READY, _BEGIN = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The middle of the predictions, and the band that contains 80 % of them."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """`end` is None for a run that does not end within the simulation: it is paused, or no runner serves a queue of it.
    `lateness`: the share of repetitions in which it misses its deadline."""

    run: RunModel
    end: Band | None
    lateness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`tasks`: the expected start and end of the waiting and running tasks, by the place of the run and the task."""

    runs: tuple[RunForecast, ...]
    tasks: dict[tuple[int, int], tuple[float, float]]
    repetitions: int


class Draws(Protocol):
    """A source of random numbers, such as `random.Random`."""

    def random(self) -> float: ...

    def choices(self, population: list[float], *, k: int) -> list[float]: ...


def forecast(snapshot: Snapshot, draws: Callable[[int], Draws], *, effort: int = EFFORT) -> Forecast:
    """`draws` makes the source of each repetition, by its number."""
    plan = _Plan(snapshot)
    count = max(FEWEST, min(MOST, effort // max(1, len(plan.task_of))))
    ends: list[list[float]] = [[] for _ in snapshot.runs]
    starts_sum, ends_sum, seen = ([0.0] * len(plan.task_of) for _ in range(3))
    for number in range(count):
        once = _Repetition(plan, draws(number))
        once.run()
        for run, end in enumerate(once.run_ends):
            ends[run].append(end)
        for group, end in enumerate(once.group_ends):
            if end < _NEVER:
                starts_sum[group] += once.group_starts[group]
                ends_sum[group] += end
                seen[group] += 1
    tasks = {
        place: (starts_sum[group] / seen[group], ends_sum[group] / seen[group])
        for group, place in enumerate(plan.places)
        if seen[group] == count
    }
    runs = tuple(_of_run(run, found) for run, found in zip(snapshot.runs, ends, strict=True))
    return Forecast(runs=runs, tasks=tasks, repetitions=count)


def _of_run(run: RunModel, ends: list[float]) -> RunForecast:
    late = 0 if run.deadline is None else sum(end > run.deadline for end in ends)
    known = sorted(end for end in ends if end < _NEVER)
    band = band_of(known) if len(known) == len(ends) else None
    return RunForecast(run=run, end=band, lateness=late / len(ends))


def band_of(ordered: Sequence[float]) -> Band:
    middle = quantile(ordered, 0.5)
    if len(ordered) >= _ENOUGH:
        return Band(low=quantile(ordered, LOW), middle=middle, high=quantile(ordered, HIGH))
    mean = sum(ordered) / len(ordered)
    count = len(ordered)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in ordered) / max(1, count - 1))
    # A few repetitions say little about the spread: as the t distribution does, wider by their number.
    width = _Z * deviation * math.sqrt(1 + 1 / count) * (1 + 1.2 / max(1, count - 1))
    return Band(low=max(0.0, middle - width), middle=middle, high=middle + width)


def spread(durations: Sequence[float]) -> list[float]:
    """The sorted durations, with one more beyond each end: the next one may be outside of those seen so far."""
    if not durations:
        return [UNKNOWN_SECONDS * share for share in (0.1, 0.5, 1.0, 2.0, 5.0)]
    ordered = sorted(durations)
    if len(ordered) < 3:
        return [ordered[0] * 0.7, *ordered, ordered[-1] * 1.4]
    gap = (ordered[-1] - ordered[0]) / len(ordered)
    return [max(ordered[0] * 0.5, ordered[0] - gap), *ordered, ordered[-1] + gap]


class _Plan:
    """The tasks of all runs in flat lists. A group is a task of a run, with all of its instances."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.task_of: list[TaskModel] = []
        self.run_of: list[int] = []
        self.places: list[tuple[int, int]] = []
        self.progress: list[TaskProgress | None] = []
        self.downstream: list[list[int]] = []
        self.waits_for: list[int] = []
        self.samples: list[int] = []
        self.sets: list[list[float]] = []
        self.open_groups: list[int] = []
        self.groups_of: list[range] = []
        self._set_of: dict[tuple[float, ...], int] = {}
        for place, run in enumerate(snapshot.runs):
            self._add(place, run)
        self.gate_names = sorted({name for task in self.task_of for name, _ in task.gates})
        numbers = {name: number for number, name in enumerate(self.gate_names)}
        self.gates = [[(numbers[name], weight) for name, weight in task.gates] for task in self.task_of]
        self.servers: dict[str, list[int]] = {}
        for number, each in enumerate(snapshot.runners):
            for queue in each.queues:
                self.servers.setdefault(queue, []).append(number)

    def _add(self, place: int, run: RunModel) -> None:
        first = len(self.task_of)
        tasks = run.version.tasks
        ended = set()
        for idx, task in enumerate(tasks):
            progress = run.progress.get(idx)
            is_over = progress is not None and progress.ended > 0 and not progress.elapsed and not progress.waiting
            if is_over:
                ended.add(idx)
            self.task_of.append(task)
            self.run_of.append(place)
            self.places.append((place, idx))
            self.progress.append(progress)
            self.downstream.append([])
            self.waits_for.append(0)
            self.samples.append(self._set(task.durations))
        for src, dst in run.version.edges:
            if src not in ended and dst not in ended:
                self.downstream[first + src].append(first + dst)
                self.waits_for[first + dst] += 1
        self.open_groups.append(len(tasks) - len(ended))
        self.groups_of.append(range(first, first + len(tasks)))
        for idx in ended:
            self.waits_for[first + idx] = -1

    def _set(self, durations: tuple[float, ...]) -> int:
        if durations not in self._set_of:
            self._set_of[durations] = len(self.sets)
            self.sets.append(spread(durations))
        return self._set_of[durations]


class _Repetition:
    def __init__(self, plan: _Plan, rng: Draws) -> None:
        self._plan, self._random = plan, rng.random
        self._sets = [rng.choices(each, k=len(each)) for each in plan.sets]
        for each in self._sets:
            each.sort()
        self._waits_for = plan.waits_for.copy()
        self._left = [0] * len(plan.task_of)
        self._open_groups = plan.open_groups.copy()
        self._free = [each.slots for each in plan.snapshot.runners]
        self._room = [plan.snapshot.gates.get(name, 1) for name in plan.gate_names]
        self._blocked: list[list[tuple[int, int, int]]] = [[] for _ in plan.gate_names]
        self._queues: dict[str, list[tuple[int, int, int]]] = {}
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._active: dict[str, int] = {}
        self._held: dict[str, list[int]] = {}
        self._seq = 0
        self._now = 0.0
        self.run_ends = [_NEVER] * len(plan.snapshot.runs)
        self.group_starts = [_NEVER] * len(plan.task_of)
        self.group_ends = [_NEVER] * len(plan.task_of)

    def run(self) -> None:
        self._begin_all()
        heap = self._heap
        while heap:
            self._now, _, action, subject, server = heappop(heap)
            if action == _FINISH:
                self._finish(subject, server)
            elif action == _READY:
                self._enqueue(subject)
            else:
                self._begin(subject)

    def _at(self, seconds: float, action: int, subject: int, server: int = -1) -> None:
        self._seq += 1
        heappush(self._heap, (seconds, self._seq, action, subject, server))

    # Runs

    def _begin_all(self) -> None:
        """Running tasks first, so that they hold their slots; then queued ones in the order of their queues."""
        plan = self._plan
        waiting: list[tuple[int, int]] = []
        for place, run in enumerate(plan.snapshot.runs):
            if run.is_started and not run.is_paused:
                self._active[run.version.dag] = self._active.get(run.version.dag, 0) + 1
                self._continue(place, waiting)
            elif not run.is_paused:
                self._at(max(0.0, run.begins), _BEGIN, place)
        heapify(waiting)
        while waiting:
            _, group = heappop(waiting)
            self._enqueue(group)

    def _continue(self, place: int, waiting: list[tuple[int, int]]) -> None:
        plan = self._plan
        if not plan.open_groups[place]:
            self._end_run(place)
        for group in plan.groups_of[place]:
            progress, required = plan.progress[group], self._waits_for[group]
            if required < 0:
                continue
            if progress is None:
                if required == 0:
                    self._ready(group)
                continue
            self._left[group] = len(progress.elapsed) + progress.waiting
            for elapsed in progress.elapsed:
                self._resume(group, elapsed)
            if progress.wakes_in is not None:
                for _ in range(progress.waiting):
                    self._at(max(0.0, progress.wakes_in), _READY, group)
            else:
                waiting += [(progress.order, group)] * progress.waiting

    def _begin(self, place: int) -> None:
        run = self._plan.snapshot.runs[place]
        dag = run.version.dag
        limit = self._plan.snapshot.active_limits.get(dag)
        if limit is not None and self._active.get(dag, 0) >= limit:
            self._held.setdefault(dag, []).append(place)
            return
        self._active[dag] = self._active.get(dag, 0) + 1
        if not self._plan.open_groups[place]:
            self._end_run(place)
        for group in self._plan.groups_of[place]:
            if self._waits_for[group] == 0:
                self._ready(group)

    def _end_run(self, place: int) -> None:
        self.run_ends[place] = self._now
        dag = self._plan.snapshot.runs[place].version.dag
        self._active[dag] -= 1
        if held := self._held.get(dag):
            self._begin(held.pop(0))

    # Tasks

    def _ready(self, group: int) -> None:
        task = self._plan.task_of[group]
        instances = 1
        if task.instances != 1.0:
            instances = int(task.instances + self._random())
        if not instances or (task.skip_share and self._random() < task.skip_share):
            self._left[group] = 1
            self.group_starts[group] = min(self.group_starts[group], self._now)
            self._end_instance(group)
            return
        self._left[group] = instances
        for _ in range(instances):
            self._enqueue(group)

    def _duration(self, group: int) -> float:
        samples = self._sets[self._plan.samples[group]]
        place = self._random() * (len(samples) - 1)
        low = int(place)
        return samples[low] + (samples[low + 1] - samples[low]) * (place - low)

    def _resume(self, group: int, elapsed: float) -> None:
        """A running one: its duration is a longer one than it has run."""
        self.group_starts[group] = min(self.group_starts[group], -elapsed)
        longer = [each for each in self._sets[self._plan.samples[group]] if each > elapsed]
        chance = self._random()
        left = longer[int(chance * len(longer))] - elapsed if longer else elapsed * (0.05 + 0.5 * chance)
        server = -1
        if self._plan.task_of[group].needs_slot:
            servers = self._plan.servers.get(self._plan.task_of[group].queue, ())
            server = next((each for each in servers if self._free[each] > 0), -1)
            if server >= 0:
                self._free[server] -= 1
        for gate, weight in self._plan.gates[group]:
            self._room[gate] -= weight
        self._at(left, _FINISH, group, server)

    def _enqueue(self, group: int) -> None:
        for gate, weight in self._plan.gates[group]:
            if self._room[gate] < weight:
                self._seq += 1
                heappush(self._blocked[gate], (self._plan.task_of[group].rank, self._seq, group))
                return
        for gate, weight in self._plan.gates[group]:
            self._room[gate] -= weight
        task = self._plan.task_of[group]
        if not task.needs_slot:
            self._start(group, -1)
            return
        for server in self._plan.servers.get(task.queue, ()):
            if self._free[server] > 0:
                self._free[server] -= 1
                self._start(group, server)
                return
        self._seq += 1
        heappush(self._queues.setdefault(task.queue, []), (task.rank, self._seq, group))

    def _start(self, group: int, server: int) -> None:
        if self._now < self.group_starts[group]:
            self.group_starts[group] = self._now
        self._at(self._now + self._duration(group), _FINISH, group, server)

    def _finish(self, group: int, server: int) -> None:
        for gate, weight in self._plan.gates[group]:
            self._room[gate] += weight
        if server >= 0:
            self._serve(server)
        for gate, _ in self._plan.gates[group]:
            self._admit(gate)
        self._end_instance(group)

    def _end_instance(self, group: int) -> None:
        self._left[group] -= 1
        if self._left[group] > 0:
            return
        plan = self._plan
        self.group_ends[group] = self._now
        for below in plan.downstream[group]:
            self._waits_for[below] -= 1
            if self._waits_for[below] == 0:
                self._ready(below)
        place = plan.run_of[group]
        self._open_groups[place] -= 1
        if self._open_groups[place] == 0:
            self._end_run(place)

    def _serve(self, server: int) -> None:
        """A slot is free: the first task of the first queue that has one takes it."""
        for queue in self._plan.snapshot.runners[server].queues:
            if waiting := self._queues.get(queue):
                _, _, group = heappop(waiting)
                self._start(group, server)
                return
        self._free[server] += 1

    def _admit(self, gate: int) -> None:
        waiting = self._blocked[gate]
        while waiting and self._room[gate] > 0:
            _, _, group = heappop(waiting)
            needed = next(weight for each, weight in self._plan.gates[group] if each == gate)
            if self._room[gate] < needed:
                heappush(waiting, (self._plan.task_of[group].rank, -1, group))
                return
            self._enqueue(group)
