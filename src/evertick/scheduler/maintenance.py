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

from evertick.config import Settings
from evertick.db.queries.shards import PendingWork
from evertick.domain.errors import NotLeader
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import CircuitBreaker, CircuitBreakers, boot_seconds
from evertick.runtime.connections import Notifier
from evertick.runtime.loop import run_loop
from evertick.scheduler import maintenance_jobs
from evertick.scheduler.leadership import LeaderConnection, Leadership
from evertick.scheduler.maintenance_jobs import Again, MaintenanceJobs
from evertick.scheduler.reconciliation import Reconciliation

# Share of a job's time: how long it may wait for one lock.
LOCK_SHARE = 0.5


# When a poll, read at the local time `now`, wants a job: inf if it has no work for it, None if it says nothing.
Due = Callable[[PendingWork, float], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One bounded batch of work.

    `first_seconds`: how long after leadership begins it is due without a poll. `retry_seconds`: how long after a
    failure it is due again without a poll. `is_paced`: once due, it decides by itself when it continues; a poll only
    begins or ends it.
    """

    name: str
    breaker: CircuitBreaker
    due: Due
    run: Callable[[AsyncConnection, int], Awaitable[Again]]
    first_seconds: float = inf
    retry_seconds: float = inf
    is_paced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateJob:
    """The same for each candidate that a poll lists. A candidate that fails pauses alone."""

    name: str
    breakers: CircuitBreakers
    candidates: Callable[[PendingWork], list[int]]
    run: Callable[[AsyncConnection, int, int], Awaitable[Again]]

    @property
    def breaker(self) -> CircuitBreaker:
        return self.breakers.whole


def local_time(instant: datetime | None, work: PendingWork, now: float) -> float:
    """An instant of the database's clock, by the local clock: `work` was read at the local time `now`."""
    return inf if instant is None else now + (instant - work.read_at).total_seconds()


def at(instant: Callable[[PendingWork], datetime | None]) -> Due:
    """Due at this instant of the poll."""
    return lambda work, now: local_time(instant(work), work, now)


def when(has_work: Callable[[PendingWork], object]) -> Due:
    """Due now if the poll has found this."""
    return lambda work, now: now if has_work(work) else inf


def promote_due(work: PendingWork, now: float) -> float:
    return min(local_time(work.next_timer, work, now), now if work.has_line else inf)


def observation_due(work: PendingWork, now: float) -> float:
    """The poll could not observe heartbeats."""
    return now if work.silent is None and work.stranded is None and not work.troubles else inf


def gates_due(work: PendingWork, now: float) -> float:
    return now if work.has_gates else local_time(work.next_opening, work, now)


def moves_due(work: PendingWork, now: float) -> float | None:
    if work.has_moves is None:
        return None
    return now if work.has_moves else inf


def from_own_timer(work: PendingWork, now: float) -> float | None:
    """For a job that the poll says nothing about."""
    return None


def lost_sessions(work: PendingWork) -> list[int]:
    return [*(work.silent or []), *(work.stranded or [])]


def overdue_runs(work: PendingWork) -> list[int]:
    return work.overdue or []


def open_backfills(work: PendingWork) -> list[int]:
    return work.backfills or []


def make_jobs(bodies: MaintenanceJobs, reconciliation: Reconciliation, *, log: Log) -> list[Job | CandidateJob]:
    """The jobs in the order in which they run. The name of a breaker is what metrics, logs and polls call the job."""
    reap, time_out, backfill = (CircuitBreakers(name, log=log) for name in ("reap", "time_out", "backfill"))

    def step(name: str) -> CircuitBreaker:
        return CircuitBreaker(name, log=log)

    return [
        Job(name="promote", breaker=step("promote"), due=promote_due, run=bodies.promote),
        Job(name="observe", breaker=reap.whole, due=observation_due, run=bodies.observe_heartbeats),
        CandidateJob(name="reap", breakers=reap, candidates=lost_sessions, run=bodies.reap),
        CandidateJob(name="time_out_runs", breakers=time_out, candidates=overdue_runs, run=bodies.time_out_run),
        Job(
            name="time_out_queued",
            breaker=time_out.whole,
            due=at(lambda work: work.next_expiry),
            run=bodies.time_out_queued_tasks,
        ),
        Job(
            name="dependencies",
            breaker=step("hear"),
            due=when(lambda work: work.has_arrivals),
            run=bodies.deliver_dependencies,
        ),
        Job(name="wake", breaker=step("wake"), due=at(lambda work: work.next_wake), run=bodies.wake_deferred_tasks),
        Job(name="admit", breaker=step("admit"), due=when(lambda work: work.with_room), run=bodies.admit_queued_runs),
        CandidateJob(name="backfill", breakers=backfill, candidates=open_backfills, run=bodies.advance_backfill),
        Job(name="gates", breaker=step("gates"), due=gates_due, run=bodies.admit_gated_tasks),
        Job(
            name="rebalance",
            breaker=step("move_out"),
            due=moves_due,
            run=bodies.rebalance_shard,
            retry_seconds=maintenance_jobs.MOVES_SECONDS,
            is_paced=True,
        ),
        *make_own_jobs(bodies, reconciliation, step),
    ]


def make_own_jobs(
    bodies: MaintenanceJobs, reconciliation: Reconciliation, step: Callable[[str], CircuitBreaker]
) -> list[Job | CandidateJob]:
    """The jobs that do not depend on the poll."""
    return [
        # A round begins at once: changes before the leadership were not observed.
        Job(
            name="reconcile",
            breaker=step("reconcile"),
            due=from_own_timer,
            run=reconciliation.run_slice,
            first_seconds=0.0,
            retry_seconds=0.0,
        ),
        Job(name="orphans", breaker=step("orphans"), due=from_own_timer, run=reconciliation.fail_orphaned_runs),
        Job(name="count_gates", breaker=step("gates"), due=from_own_timer, run=reconciliation.count_gates),
        # Not at once, so that schedules that fell due before the leadership can fire first.
        Job(
            name="alerts",
            breaker=step("alerts"),
            due=from_own_timer,
            run=bodies.raise_alerts,
            first_seconds=maintenance_jobs.ALERT_SECONDS,
            retry_seconds=maintenance_jobs.ALERT_SECONDS,
        ),
    ]


class Maintenance:
    """The maintenance of one shard. `wake_leader` is set when the leader has to act: leadership is lost, or
    `is_shard_closed`."""

    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        leadership: Leadership,
        waker: Notifier,
        wake_leader: asyncio.Event,
        log: Log,
    ) -> None:
        self._settings, self._leadership, self._log = settings, leadership, log
        self._wake_leader = wake_leader
        self._connection = LeaderConnection(url, leadership, settings, lock_share=LOCK_SHARE)
        self._bodies = MaintenanceJobs(settings, shard=leadership.shard, waker=waker, log=log)
        self._reconciliation = Reconciliation(settings, shard=leadership.shard, waker=waker, log=log)
        self._jobs = make_jobs(self._bodies, self._reconciliation, log=log)
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
        self.is_shard_closed = False

    def plan(self, work: PendingWork) -> None:
        """The leader's latest poll."""
        now = boot_seconds()
        self._read_at = (work.read_at, now)
        for trouble in work.troubles:
            self._fail(*trouble.split(": ", 1))
        for job in self._jobs:
            if isinstance(job, CandidateJob):
                self._candidates[job.name] = job.candidates(work)
                self._due_at[job.name] = now if self._candidates[job.name] else inf
                continue
            due = job.due(work, now)
            if due is None or (job.is_paced and max(due, self._due_at[job.name]) < inf):
                continue
            self._due_at[job.name] = due
        if observation_due(work, now) == inf:
            self._bodies.forget_observation()
        if self._next_at() <= now:
            self._wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        never = asyncio.Event()
        await run_loop(self.tick, wake=self._wake, stop=never, name=self._leadership.loop_name("tend"), log=self._log)

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
        return max(0.0, min(pause, self._settings.tick_seconds))

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
                continue
            await self._run_job(job, conn)

    async def _run_job(self, job: Job, conn: AsyncConnection) -> None:
        self._due_at[job.name] = before = boot_seconds() + job.retry_seconds
        again = await job.breaker.attempt(conn, partial(job.run, conn, self._epoch))
        if again is None:
            return
        next_at, polled = self._local(again), self._due_at[job.name]
        # A poll that was read meanwhile may have found work that this run did not.
        self._due_at[job.name] = next_at if polled == before else min(next_at, polled)
        self._follow(again)

    async def _run_candidate(self, job: CandidateJob, conn: AsyncConnection, candidate: int) -> None:
        if self._leadership.may_plan:
            again = await job.run(conn, self._epoch, candidate)
            self._due_at[job.name] = min(self._due_at[job.name], self._local(again))
            self._follow(again)

    def _follow(self, again: Again) -> None:
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

    @property
    def _epoch(self) -> int:
        if self._leadership.epoch is None:
            raise NotLeader(f"shard {self._leadership.shard} is led by another scheduler")
        return self._leadership.epoch

    def _next_at(self) -> float:
        """When the next job is due, by the local clock."""
        return min(self._next_at_of(job) for job in self._jobs)

    def _next_at_of(self, job: Job | CandidateJob) -> float:
        return max(self._due_at[job.name], job.breaker.rests_until)

    def _local(self, again: Again) -> float:
        """When it is due again, by the local clock."""
        earliest = boot_seconds() + again.in_seconds
        if again.at is None or self._read_at is None:
            return earliest
        read_at, now = self._read_at
        return max(earliest, now + (again.at - read_at).total_seconds())
