"""The leader's count of ended runs: the figures of DAGs and tasks in the database, and those of the busiest as metrics.

Reads each ended run once, in slices, with a pause that bounds its share of a connection. Never part of planning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from prometheus_client import Counter, Gauge
from psycopg import AsyncConnection

from evertick.domain.monitoring.busiest import Busiest
from evertick.engine.monitoring.figures import AddedFigures, count_figures
from evertick.observability import metrics
from evertick.processes.system import boot_seconds
from evertick.scheduler.leadership import LeaderKey
from evertick.scheduler.maintenance_jobs import Rerun

COUNT_SECONDS = 10.0
RUNS_AT_ONCE = 500
# A run may become visible a moment after the time at which it ended.
SETTLE_SECONDS = 2.0
# The pause after a slice, as a multiple of its duration.
PAUSE_FACTOR = 99
MOST_SERIES = 100
AGE_SECONDS = 3600.0

# The first of each has the state as well.
_BY_TASK: tuple[Counter | Gauge, ...] = (
    *(metrics.TASKS_ENDED, metrics.TASK_RETRIES, metrics.TASK_DURATION, metrics.TASK_WAIT, metrics.TASK_CPU),
    metrics.TASK_MEMORY,
)
_BY_DAG: tuple[Counter | Gauge, ...] = (metrics.DAG_RUNS, metrics.DAG_RUN_DURATION, metrics.DAG_LANDING)
_STATES = ("success", "failed", "other")


class Figures:
    """One slice per call. Series exist only in the leader: two that export the same ones would be added up."""

    def __init__(self) -> None:
        self._tasks, self._dags = Busiest(MOST_SERIES), Busiest(MOST_SERIES)
        self._aged_at = boot_seconds()

    def begin(self) -> None:
        """Leadership begins: another scheduler may have led since. Another shard of this one has no series."""
        if self._tasks.is_empty and self._dags.is_empty:
            return
        self._tasks, self._dags = Busiest(MOST_SERIES), Busiest(MOST_SERIES)
        for each in (*_BY_TASK, *_BY_DAG):
            each.clear()

    async def run_slice(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        if leader["shard"] != 0:
            return Rerun()
        started_at = boot_seconds()
        added = await count_figures(conn, **leader, limit=RUNS_AT_ONCE, settle_seconds=SETTLE_SECONDS)
        now = boot_seconds()
        for each in added:
            if each.task:
                self._count_task(each)
            else:
                self._count_runs(each)
        if now - self._aged_at >= AGE_SECONDS:
            self._aged_at = now
            self._tasks.age()
            self._dags.age()
        is_full = bool(added) and added[0].runs == RUNS_AT_ONCE
        pause = (now - started_at) * PAUSE_FACTOR
        return Rerun(in_seconds=pause if is_full else max(pause, COUNT_SECONDS))

    def _count_task(self, each: AddedFigures) -> None:
        ended = each.succeeded + each.failed + each.other
        name, replaced = self._tasks.add((each.dag, each.task), ended)
        if replaced is not None:
            _end_series(_BY_TASK, replaced)
        for state, count in zip(_STATES, (each.succeeded, each.failed, each.other), strict=True):
            metrics.TASKS_ENDED.labels(*name, state).inc(count)
        metrics.TASK_RETRIES.labels(*name).inc(each.retries)
        metrics.TASK_DURATION.labels(*name).inc(each.duration_seconds)
        metrics.TASK_WAIT.labels(*name).inc(each.wait_seconds)
        metrics.TASK_CPU.labels(*name).inc(each.cpu_seconds)
        metrics.TASK_MEMORY.labels(*name).set(each.peak_memory_bytes or 0)

    def _count_runs(self, each: AddedFigures) -> None:
        (dag, _), replaced = self._dags.add((each.dag, ""), each.succeeded + each.failed + each.other)
        if replaced is not None:
            _end_series(_BY_DAG, replaced[:1])
        for state, count in zip(_STATES, (each.succeeded, each.failed, each.other), strict=True):
            metrics.DAG_RUNS.labels(dag, state).inc(count)
        metrics.DAG_RUN_DURATION.labels(dag).inc(each.duration_seconds)
        if each.landed:
            metrics.DAG_LANDING.labels(dag).set(each.landing_seconds / each.landed)


def _end_series(families: Sequence[Counter | Gauge], name: Sequence[str]) -> None:
    by_state, *others = families
    for state in _STATES:
        by_state.remove(*name, state)
    for each in others:
        with suppress(KeyError):  # no run of it has landed
            each.remove(*name)
