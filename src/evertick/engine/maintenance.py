"""Maintenance of a shard: due retries, timeouts, dependencies, reconciliation, and alerts.

Only the leader of the shard does this: each operation is one bounded batch, fenced by the leader's epoch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.queries import assets
from evertick.db.queries.assets import UnmappedUpdate
from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.dependencies import Condition, Source, read_text, sources_of
from evertick.domain.schedules.partitions import read_mapper, targets_of
from evertick.domain.schedules.run_partitions import Received, date_of_ready, is_ready
from evertick.engine.fire_schedules import UNPLANNABLE, JsonObject, read_spec
from evertick.engine.verbs import leader_verb


@dataclass(frozen=True, slots=True)
class Promoted:
    """`refused`: rows that had to be quarantined; `has_waiting_retries`: some retries wait for capacity."""

    promoted: int
    refused: int
    next_due: datetime | None
    has_waiting_retries: bool


@dataclass(frozen=True, slots=True)
class TimedOut:
    failed: int
    refused: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """How many queued runs started, and how many DAGs were quarantined because their runs could not."""

    admitted: int
    refused: int


@dataclass(frozen=True, slots=True)
class Reconciled:
    last_dag_id: int | None
    last_run_id: int | None
    repaired: list[str]
    refused: int

    @property
    def last(self) -> tuple[int, int]:
        """Where the next batch starts."""
        return (self.last_dag_id or 0, self.last_run_id or 0)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The run that was passed over: the next batch starts after it. Both are None at the end."""

    skipped_dag_id: int | None
    skipped_run_id: int | None

    @property
    def last(self) -> tuple[int, int]:
        """Where the next batch starts."""
        return (self.skipped_dag_id or 0, self.skipped_run_id or 0)


@dataclass(frozen=True, slots=True)
class DependenciesDelivered:
    """`has_partitions`: updates of partitions are still to be mapped, see `map_arrivals`."""

    became_due: int
    has_more: bool
    has_partitions: bool


@dataclass(frozen=True, slots=True)
class AlertChange:
    """An alert that was raised or resolved. A run without a schedule has only a notification. `task` may be empty."""

    kind: str
    dag: str
    schedule: str | None
    run_id: int | None
    task: str
    has_ended: bool


@leader_verb
async def promote_due_tasks(
    conn: AsyncConnection, *, shard: int, epoch: int, limit: int, bound: int | None = None
) -> Promoted:
    """One batch. The result says when the next task is due by time, and whether some wait for the limit.

    `bound` is the limit of active retries per queue; None is half of the slots of the live runners that serve it.
    """


@leader_verb
async def time_out_run(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int) -> int | None:
    """The number of tasks with a stop request; None if the run is no longer over its limit, -1 if it was quarantined."""


@leader_verb
async def time_out_queued_tasks(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> TimedOut:
    """Fail one batch of the tasks that were queued longer than their queue_timeout."""


@leader_verb
async def deliver_dependencies(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> DependenciesDelivered:
    """Deliver one batch of events."""


@leader_verb
async def reconcile_runs(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    after_dag: int = 0,
    after_run: int = 0,
    limit: int,
    elapsed: float = 0.0,
    counts_line: bool = True,
) -> Reconciled:
    """Repair one batch. `last` is where the next batch starts; (0, 0) is the beginning.

    `elapsed` is added to the time for which a stuck run has been watched. `counts_line` also looks for tasks that are
    missing in the queue, which reads all of it.
    """


@leader_verb
async def skip_run_once(conn: AsyncConnection, *, shard: int, epoch: int, after_dag: int, after_run: int) -> Skipped:
    """Quarantine the next run, whose check alone exceeds the time limit."""


@leader_verb
async def admit_queued_runs(conn: AsyncConnection, *, shard: int, epoch: int) -> Admitted:
    """Start queued runs that were passed over while they were locked."""


@leader_verb
async def fail_orphaned_run(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int, after: float) -> str:
    """Fail a run in which nothing could move for that long: 'reaped', 'moved' (it is not stuck), or 'refused'."""


@leader_verb
async def raise_alerts(
    conn: AsyncConnection, *, shard: int, epoch: int, unfired_seconds: float, limit: int
) -> list[AlertChange]:
    """The alerts that were raised or resolved."""


# Partitions of assets: everything that is decided is stored in one transaction, together with the removal of what was decided on.
# -------------------------------------------------------------------------------------------------

_Target = tuple[int, str]  # a schedule, and a key of its runs


@dataclass(frozen=True, slots=True)
class UpdatesApplied:
    mapped: int
    became_due: int


@leader_verb
async def apply_partition_arrivals(
    conn: AsyncConnection, *, shard: int, epoch: int, mapped: list[JsonObject], ready: list[JsonObject]
) -> UpdatesApplied: ...


async def map_arrivals(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> UpdatesApplied:
    """One batch. A schedule that changes meanwhile is left for the next one."""
    found = await assets.arrivals(conn, limit=limit)
    if not found:
        return UpdatesApplied(0, 0)
    conditions = {each.schedule_id: _condition(each) for each in found}
    received: dict[_Target, set[Received]] = defaultdict(set)
    mapped: list[JsonObject] = []
    for each in found:
        keys, problem = _targets(each, conditions[each.schedule_id])
        date = None if each.source_date is None else each.source_date.isoformat()
        row = {"arrival_id": each.arrival_id, "version": each.version, "keys": keys}
        mapped.append({**row, "source_date": date, "problem": problem})
        for key in keys:
            received[each.schedule_id, key].add(Received(asset=each.asset, key=each.key, date=each.source_date))
    touched = sorted(received)
    for before in await assets.pending(
        conn, schedule_ids=[schedule for schedule, _ in touched], keys=[key for _, key in touched]
    ):
        update = Received(asset=before.asset, key=before.source_key, date=before.source_date)
        received[before.schedule_id, before.key].add(update)
    versions = {each.schedule_id: each.version for each in found}
    ready: list[JsonObject] = []
    for schedule, key in touched:
        condition, updates = conditions[schedule], received[schedule, key]
        if condition is not None and is_ready(condition, key, updates):
            date_of = date_of_ready(condition, key, updates)
            date = None if date_of is None else date_of.isoformat()
            ready.append({"schedule_id": schedule, "version": versions[schedule], "key": key, "date": date})
    return await apply_partition_arrivals(conn, shard=shard, epoch=epoch, mapped=mapped, ready=ready)


def _condition(arrival: UnmappedUpdate) -> Condition | Source | None:
    """None if it cannot be read: it never waits for a partition then."""
    try:
        return read_text(read_spec(arrival.spec).after or "")
    except UNPLANNABLE:
        return None


def _targets(arrival: UnmappedUpdate, condition: Condition | Source | None) -> tuple[list[str], str | None]:
    """The partitions that the update counts for, or why there are none."""
    mappers = (
        source.mapper
        for source in (() if condition is None else sources_of(condition))
        if source.name == arrival.asset and source.mapper is not None
    )
    text = next(mappers, None)
    if text is None:
        return [], "the schedule does not wait for partitions of this asset"
    try:
        return targets_of(read_mapper(text), arrival.key), None
    except InvalidSchedule as error:
        return [], str(error)[:500]
