"""The leader's maintenance: a table of jobs, and the loop that runs each when it is due.

On its own connection, so that it cannot delay a fire. It queries nothing to find work: the leader's poll reports what
is pending, and only reconciliation and alerts have their own timers. A job that fails pauses, and the others continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import inf

from psycopg import AsyncConnection

from evertick.domain.errors import NotLeader
from evertick.engine.shards import PendingWork
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runtime.circuit_breaker import CircuitBreaker, CircuitBreakers
from evertick.runtime.connections import Notifier
from evertick.runtime.loop import run_loop
from evertick.scheduler.figures import COUNT_SECONDS, Figures
from evertick.scheduler.forecaster import FORECAST_SECONDS, Forecaster
from evertick.scheduler.leadership import LeaderConnection, LeaderKey, Leadership
from evertick.scheduler.maintenance_jobs import (
    ALERT_SECONDS,
    CHECKIN_SECONDS,
    LINEAGE_SECONDS,
    MOVES_SECONDS,
    MaintenanceJobs,
    Reconciliation,
    Rerun,
)
from evertick.scheduler.prover import FIRST_SECONDS, ROUND_SECONDS, Prover

# Share of a job's time: how long it may wait for one lock.
LOCK_SHARE = 0.5


# When a poll, read at the local time `now`, wants a job: inf if it has no work for it, None if it says nothing.
Due = Callable[[PendingWork, float], float | None]


@dataclass(frozen=True, slots=True)
class Job:
    """One bounded batch of work.

    `first_seconds`: how long after leadership begins it is due without a poll. `retry_seconds`: how long after a
    failure it is due again without a poll. `is_paced`: once due, it decides by itself when it continues; a poll only
    begins or ends it.
    """

    name: str
    breaker: CircuitBreaker
    due: Due
    run: Callable[[AsyncConnection, LeaderKey], Awaitable[Rerun | None]]
    first_seconds: float = inf
    retry_seconds: float = inf
    is_paced: bool = False


@dataclass(frozen=True, slots=True)
class CandidateJob:
    """The same for each candidate that a poll lists. A candidate that fails pauses alone."""

    name: str
    breakers: CircuitBreakers
    candidates: Callable[[PendingWork], list[int]]
    run: Callable[[AsyncConnection, LeaderKey, int], Awaitable[Rerun | None]]

    @property
    def breaker(self) -> CircuitBreaker:
        return self.breakers.whole


def local_time(instant: datetime | None, work: PendingWork, now: float) -> float:
    """An instant of the database's clock, by the local clock: `work` was read at the local time `now`."""
    return inf if instant is None else now + (instant - work.read_at).total_seconds()


def never(work: PendingWork) -> bool:
    return False


def when(has_work: Callable[[PendingWork], object]) -> Due:
    """Due now if the poll has found this."""
    return lambda work, now: now if has_work(work) else inf


def at(instant: Callable[[PendingWork], datetime | None], *, or_when: Callable[[PendingWork], object] = never) -> Due:
    """Due at this instant of the poll, or now if the poll has found the other."""
    return lambda work, now: now if or_when(work) else local_time(instant(work), work, now)


def observation_due(work: PendingWork, now: float) -> float:
    """The poll could not observe heartbeats."""
    return now if work.silent_sessions is None and work.dead_sessions is None and not work.errors else inf


def moves_due(work: PendingWork, now: float) -> float | None:
    if work.has_moves is None:
        return None
    return now if work.has_moves else inf


def from_own_timer(work: PendingWork, now: float) -> float | None:
    """For a job that the poll says nothing about."""
    return None


def has_requests(work: PendingWork) -> bool:
    return bool(work.has_requests)


def lost_sessions(work: PendingWork) -> list[int]:
    return [*(work.silent_sessions or []), *(work.dead_sessions or [])]


def make_jobs(
    jobs: MaintenanceJobs,
    reconciliation: Reconciliation,
    prover: Prover,
    figures: Figures,
    forecaster: Forecaster,
    *,
    log: Log,
) -> list[Job | CandidateJob]:
    """The jobs in the order in which they run. The name of a breaker is what metrics, logs and polls call the job."""
    reap, time_out, backfill = (CircuitBreakers(name, log=log) for name in ("reap", "time_out", "backfill"))

    def own(name: str) -> CircuitBreaker:
        return CircuitBreaker(name, log=log)

    timers = at(lambda work: work.next_timer, or_when=lambda work: work.has_waiting_retries)
    openings = at(lambda work: work.next_opening, or_when=lambda work: work.has_gates)
    return [
        Job("promote", own("promote"), timers, jobs.promote),
        Job("observe", reap.whole, observation_due, jobs.observe_heartbeats),
        CandidateJob("reap", reap, lost_sessions, jobs.reap),
        CandidateJob("time_out_runs", time_out, lambda work: work.overdue or [], jobs.time_out_run),
        Job("time_out_queued", time_out.whole, at(lambda work: work.next_expiry), jobs.time_out_queued_tasks),
        Job("dependencies", own("hear"), when(lambda work: work.has_arrivals), jobs.deliver_dependencies),
        Job("wake", own("wake"), at(lambda work: work.next_wake), jobs.wake_deferred_tasks),
        Job("admit", own("admit"), when(lambda work: work.dags_with_free_slots), jobs.admit_queued_runs),
        Job("requests", own("inbox"), at(lambda work: work.next_start, or_when=has_requests), jobs.take_requests),
        CandidateJob("backfill", backfill, lambda work: work.backfills or [], jobs.advance_backfill),
        Job("gates", own("gates"), openings, jobs.admit_gated_tasks),
        Job("rebalance", own("move_out"), moves_due, jobs.rebalance_shard, retry_seconds=MOVES_SECONDS, is_paced=True),
        # A round begins at once: changes before the leadership were not observed.
        Job("reconcile", own("reconcile"), from_own_timer, reconciliation.run_slice, first_seconds=0, retry_seconds=0),
        Job("orphans", own("orphans"), from_own_timer, reconciliation.fail_orphaned_runs),
        Job("count_gates", own("gates"), from_own_timer, reconciliation.count_gates),
        # Not at once, so that schedules that fell due before the leadership can fire first.
        Job("alerts", own("alerts"), from_own_timer, jobs.raise_alerts, ALERT_SECONDS, ALERT_SECONDS),
        Job("checkins", own("checkins"), from_own_timer, jobs.raise_late_checkins, CHECKIN_SECONDS, CHECKIN_SECONDS),
        Job("lineage", own("lineage"), from_own_timer, jobs.enqueue_lineage, LINEAGE_SECONDS, LINEAGE_SECONDS),
        Job("prove", own("prove"), from_own_timer, prover.run_slice, FIRST_SECONDS, ROUND_SECONDS),
        Job("forecast", own("forecast"), from_own_timer, forecaster.run_slice, FORECAST_SECONDS, FORECAST_SECONDS),
        Job("figures", own("figures"), from_own_timer, figures.run_slice, COUNT_SECONDS, COUNT_SECONDS),
    ]


class Maintenance:
    """The maintenance of one shard. `wake_leader` is set when the leader has to act: leadership is lost, or
    `is_shard_closed`."""

    def __init__(self, leadership: Leadership, *, notifier: Notifier, wake_leader: asyncio.Event, log: Log) -> None:
        self._leadership, self._wake_leader, self._log = leadership, wake_leader, log
        self._connection = LeaderConnection(leadership, lock_share=LOCK_SHARE)
        self._bodies = MaintenanceJobs(leadership.settings, notifier=notifier, log=log)
        self._reconciliation = Reconciliation(leadership.settings, notifier=notifier, log=log)
        self._figures = Figures()
        observers = Prover(log=log), self._figures, Forecaster(log=log)
        self._jobs = make_jobs(self._bodies, self._reconciliation, *observers, log=log)
        # By the name that a poll uses: the first job with that name has its breaker failed.
        self._breakers = {job.breaker.name: job.breaker for job in reversed(self._jobs)}
        self._wake = asyncio.Event()
        self._read_at: tuple[datetime, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Leadership begins: discard all earlier knowledge."""
        now = boot_seconds()
        self._due_at = {job.name: now + (job.first_seconds if isinstance(job, Job) else inf) for job in self._jobs}
        self._candidates: dict[str, list[int]] = {}
        self._bodies.forget_observation()
        self._reconciliation.begin()
        self._figures.begin()
        self.is_shard_closed = False

    def plan(self, work: PendingWork) -> None:
        """The leader's latest poll."""
        now = boot_seconds()
        self._read_at = (work.read_at, now)
        for error in work.errors:
            self._fail(*error.split(": ", 1))
        for job in self._jobs:
            if isinstance(job, CandidateJob):
                self._candidates[job.name] = job.candidates(work)
                self._due_at[job.name] = now if self._candidates[job.name] else inf
                continue
            due = job.due(work, now)
            if due is not None and not (job.is_paced and max(due, self._due_at[job.name]) < inf):
                self._due_at[job.name] = due
        if observation_due(work, now) == inf:
            self._bodies.forget_observation()
        if self._next_at() <= now:
            self._wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        await run_loop(self.tick, wake=self._wake, name=self._leadership.loop_name("tend"), log=self._log)

    async def tick(self) -> float:
        """Run every job that is due, once."""
        if self._leadership.may_plan and self._next_at() <= boot_seconds():
            try:
                await self._run_due(await self._connection.get())
            except NotLeader as error:
                self._log.warning("leadership_lost", error=error)
                self.begin()
                self._wake_leader.set()
        if self._leadership.epoch is None:
            await self._connection.close()
        pause = self._next_at() - boot_seconds() if self._leadership.may_plan else inf
        return max(0.0, min(pause, self._leadership.settings.tick_seconds))

    async def close(self) -> None:
        await self._connection.close()

    async def _run_due(self, conn: AsyncConnection) -> None:
        for job in self._jobs:
            if not self._leadership.may_plan or self._next_at_of(job) > boot_seconds():
                continue
            if isinstance(job, CandidateJob):
                self._due_at[job.name] = inf
                candidates = self._candidates.get(job.name, [])
                await job.breakers.attempt(conn, candidates, partial(self._run_candidate, job, conn))
            else:
                await self._run_job(job, conn)

    async def _run_job(self, job: Job, conn: AsyncConnection) -> None:
        self._due_at[job.name] = before = boot_seconds() + job.retry_seconds
        again = await job.breaker.attempt(conn, partial(job.run, conn, self._leadership.key))
        if again is None:
            return
        next_at, polled = self._local(again), self._due_at[job.name]
        # A poll that was read meanwhile may have found work that this run did not.
        self._due_at[job.name] = next_at if polled == before else min(next_at, polled)
        self._follow(again)

    async def _run_candidate(self, job: CandidateJob, conn: AsyncConnection, candidate: int) -> None:
        if self._leadership.may_plan:
            again = await job.run(conn, self._leadership.key, candidate)
            if again is not None:
                self._due_at[job.name] = min(self._due_at[job.name], self._local(again))
                self._follow(again)

    def _follow(self, again: Rerun) -> None:
        for name, candidates in again.also.items():
            self._candidates[name] = candidates
            self._due_at[name] = boot_seconds()
        if again.is_shard_closed:
            self.is_shard_closed = True
            self._wake_leader.set()

    def _fail(self, name: str, reason: str) -> None:
        """A part of the poll failed, which the job of that name needs."""
        if name == "reap":
            metrics.AGENT_LOST_LIST_ERROR.inc()
        if name in self._breakers:
            self._breakers[name].fail(reason)
        else:
            metrics.JOB_FAILURES.labels(job=name).inc()
            self._log.error("job_failed", job=name, error=reason)

    def _next_at(self) -> float:
        """When the next job is due, by the local clock."""
        return min(self._next_at_of(job) for job in self._jobs)

    def _next_at_of(self, job: Job | CandidateJob) -> float:
        return max(self._due_at[job.name], job.breaker.rests_until)

    def _local(self, again: Rerun) -> float:
        """When it is due again, by the local clock."""
        earliest = boot_seconds() + again.in_seconds
        if again.at is None or self._read_at is None:
            return earliest
        read_at, now = self._read_at
        return max(earliest, now + (again.at - read_at).total_seconds())
