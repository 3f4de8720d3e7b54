"""Everything that is known about a run of the fault suite, as plain records. The checker reads this and nothing else.

Times that end in `_ns` are of the machine's boot clock; times that end in `_at` are what the database's wall clock said.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any, NamedTuple

from tests.chaos.effects import Effect
from tests.chaos.record import ClientRequest, Nemesis
from tests.chaos.sink import Sink

TaskId = tuple[int, int, int]  # run, index, map index


class TaskMove(NamedTuple):
    """One committed change of a task's state, epoch or session. No old state: the row is new (or the task was waiting)."""

    entry: int
    tx: int
    at_ns: int
    run_id: int
    idx: int
    map_index: int
    old_state: str | None
    new_state: str | None
    old_epoch: int | None
    new_epoch: int | None
    old_session: int | None
    new_session: int | None
    attempt: int | None
    losses: int | None
    reason: str | None

    @property
    def task(self) -> TaskId:
        return self.run_id, self.idx, self.map_index


class RunMove(NamedTuple):
    entry: int
    tx: int
    at: datetime
    at_ns: int
    run_id: int
    old_state: str | None
    new_state: str | None
    reason: str | None


class LeaseMove(NamedTuple):
    entry: int
    tx: int
    at_ns: int
    session: int
    run_id: int
    idx: int
    map_index: int
    epoch: int
    is_gained: bool

    @property
    def task(self) -> TaskId:
        return self.run_id, self.idx, self.map_index


class AttemptReport(NamedTuple):
    """What a session said about an attempt. `kind` is the outcome; lost means that somebody gave its owner up."""

    entry: int
    tx: int
    at_ns: int
    session: int
    run_id: int
    idx: int
    map_index: int
    epoch: int
    kind: str
    is_refused: bool

    @property
    def task(self) -> TaskId:
        return self.run_id, self.idx, self.map_index


class LeaderCommit(NamedTuple):
    """In the order of the commits. kind: take, renew, planning (with their epoch), silence, gone (known by the backend)."""

    place: int
    tx: int
    backend: str
    at_ns: int
    kind: str
    shard: int | None
    epoch: int | None


class ShardMove(NamedTuple):
    """A change of a shard's row: its leader renews, resigns or changes, or there are more or fewer shards."""

    entry: int
    at: datetime
    at_ns: int
    shard: int
    old_epoch: int | None
    new_epoch: int | None
    owner: str | None
    state: str | None = "open"


class ScheduleMove(NamedTuple):
    """A change of a schedule's cursor, version, pause or quarantine."""

    entry: int
    at: datetime
    at_ns: int
    schedule_id: int
    version: int | None
    old_due: datetime | None
    new_due: datetime | None
    is_paused: bool | None
    error: str | None
    is_same_version: bool | None


class ScheduleVersion(NamedTuple):
    entry: int
    at: datetime
    schedule_id: int
    dag: str
    name: str
    version: int
    spec: Mapping[str, Any]
    misfire: str
    window_seconds: float | None
    request: str | None
    changed_by: str
    is_deleted: bool
    overlap: str = "allow"


class RunFact(NamedTuple):
    run_id: int
    dag: str
    version_id: int
    kind: str
    schedule_id: int | None
    fire_at: datetime | None
    key: str | None
    triggered_by: str
    created_at: datetime
    state: str | None
    params: Mapping[str, Any] = {}


class Skip(NamedTuple):
    schedule_id: int
    first_at: datetime
    last_at: datetime
    total: int
    reason: str
    recorded_at: datetime


class RunnerMove(NamedTuple):
    """what: started, beat, silence, gone."""

    entry: int
    at_ns: int
    session: int
    what: str
    reason: str | None


class RunnerFact(NamedTuple):
    session: int
    runner_id: str
    pid: int


class PastAttempt(NamedTuple):
    """A row of the table of superseded attempts."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int | None


class ResultRow(NamedTuple):
    run_id: int
    idx: int
    map_index: int
    epoch: int


class Need(NamedTuple):
    """One gate that a task must pass. The name of a key is a template; a pool's capacity is not the DAG's."""

    kind: str
    name: str
    weight: int
    capacity: int | None


class TaskPlan(NamedTuple):
    """What a version says about one task, as published."""

    name: str
    max_attempts: int
    retry: Mapping[str, Any]
    needs: tuple[Need, ...] = ()


class PoolMove(NamedTuple):
    """A pool was made, or has another size from here on."""

    entry: int
    name: str
    capacity: int


class Leftover(NamedTuple):
    """Something that is not at rest although everything should be."""

    kind: str
    text: str
    run_id: int | None = None


class Change(NamedTuple):
    """Something that a client asked for, as far as the database knows: the verb, and the request that it was made under."""

    op: str
    request: str


class ClockReading(NamedTuple):
    """The database's wall clock and the machine's clock at one instant."""

    at_ns: int
    wall_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One run of the suite. Everything is in the order in which it happened."""

    effects: tuple[Effect, ...] = ()
    sink: Sink = field(default_factory=Sink)
    nemesis: Nemesis = field(default_factory=Nemesis)
    client: tuple[ClientRequest, ...] = ()
    task_moves: tuple[TaskMove, ...] = ()
    run_moves: tuple[RunMove, ...] = ()
    lease_moves: tuple[LeaseMove, ...] = ()
    reports: tuple[AttemptReport, ...] = ()
    leader_commits: tuple[LeaderCommit, ...] = ()
    shard_moves: tuple[ShardMove, ...] = ()
    schedule_moves: tuple[ScheduleMove, ...] = ()
    schedule_versions: tuple[ScheduleVersion, ...] = ()
    runner_moves: tuple[RunnerMove, ...] = ()
    runners: tuple[RunnerFact, ...] = ()
    runs: tuple[RunFact, ...] = ()
    skips: tuple[Skip, ...] = ()
    past_attempts: tuple[PastAttempt, ...] = ()
    results: tuple[ResultRow, ...] = ()
    plans: Mapping[tuple[int, int], TaskPlan] = field(default_factory=dict)  # (version_id, idx)
    changed_facts: tuple[str, ...] = ()
    pool_moves: tuple[PoolMove, ...] = ()
    limits_broken: tuple[str, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    changes: tuple[Change, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    clock: tuple[ClockReading, ...] = ()
    read_at: datetime | None = None
    read_ns: int = 0


class ClockMap:
    """From the database's wall clock to the machine's clock and back, however often the former was set."""

    def __init__(self, readings: tuple[ClockReading, ...]) -> None:
        ordered = sorted(readings)
        self._boot = [reading.at_ns for reading in ordered]
        self._wall = [_ns(reading.wall_at) for reading in ordered]
        # What the wall clock had shown by then at the latest: where it was set back, nothing is reached again.
        self._shown = list(accumulate(self._wall, max))

    def __bool__(self) -> bool:
        return bool(self._boot)

    @property
    def latest_at(self) -> datetime:
        """The latest time that the wall clock ever showed."""
        return _EPOCH + timedelta(microseconds=self._shown[-1] // 1000)

    def reached_ns(self, wall_at: datetime) -> int:
        """When the wall clock first showed this time."""
        wall = _ns(wall_at)
        place = bisect_left(self._shown, wall)
        if place == len(self._boot):
            return self._boot[-1] + wall - self._wall[-1]
        at = self._boot[place] - (self._wall[place] - wall)
        # Earlier than the reading before it, the clock was set in between: by now it surely showed it.
        return self._boot[place] if place and at < self._boot[place - 1] else at

    def wall_at(self, boot_ns: int) -> datetime:
        """What the wall clock showed then."""
        place = max(bisect_right(self._boot, boot_ns) - 1, 0)
        return _EPOCH + timedelta(microseconds=(self._wall[place] + boot_ns - self._boot[place]) // 1000)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _ns(instant: datetime) -> int:
    return (instant - _EPOCH) // timedelta(microseconds=1) * 1000
