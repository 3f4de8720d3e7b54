"""The bodies of the leader's maintenance jobs: each calls one verb of the engine, counts and logs what it changed, and
notifies the processes that can act on that. When a job is due is decided in `maintenance`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import inf

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.engine.backfills import advance
from evertick.engine.gates import admit_gated_tasks
from evertick.engine.maintenance import (
    admit,
    deliver_dependencies,
    promote,
    raise_alerts,
    rebalance_shard,
    time_out_run,
    time_out_waits,
)
from evertick.engine.runners import observe_heartbeats, reap_runner
from evertick.engine.waits import wake
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import boot_seconds
from evertick.runtime.connections import Notifier

# Retries that wait for a free slot, or whose run is locked: soon after progress, later without.
SOON_SECONDS, LATER_SECONDS = 0.02, 0.1
# How many rows change their shard in one transaction, and how often a leader checks for more after it found none.
MOVES_AT_ONCE, MOVES_SECONDS = 500, 5.0
# Alerts are for people: a delay of a few seconds does not matter.
ALERT_SECONDS = 5.0
# A change of leader takes up to 6 s, and a locked schedule can take a few more.
UNFIRED_SECONDS = 60.0
ALERTS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """When a job is due again: after `in_seconds`, and not before `at` by the database's clock. Without either, when the
    leader's next poll reports work. `also`: other jobs that are due now, with their candidates."""

    in_seconds: float = inf
    at: datetime | None = None
    also: Mapping[str, list[int]] = field(default_factory=dict)
    is_shard_closed: bool = False


def at_instant(instant: datetime | None, *, in_seconds: float) -> Again:
    """At that instant, if there is one, and at the earliest after `in_seconds`."""
    return Again() if instant is None else Again(in_seconds=in_seconds, at=instant)


class MaintenanceJobs:
    """The jobs of one shard."""

    def __init__(self, settings: Settings, *, shard: int, waker: Notifier, log: Log) -> None:
        self._settings, self._shard, self._waker, self._log = settings, shard, waker, log
        self._observed_at = 0.0

    async def promote(self, conn: AsyncConnection, epoch: int) -> Again:
        done = await promote(
            conn,
            shard=self._shard,
            epoch=epoch,
            batch=self._settings.promote_batch,
            max_active_retries=self._settings.max_active_retries,
        )
        self._count_refused("run", done.refused, verb="promote")
        if done.promoted:
            self._waker.wake(Channel.TASKS)
        pause = SOON_SECONDS if done.promoted else LATER_SECONDS
        return Again(in_seconds=pause) if done.has_line else at_instant(done.next_due, in_seconds=pause)

    async def observe_heartbeats(self, conn: AsyncConnection, epoch: int) -> Again:
        """The fallback when the leader's poll could not observe heartbeats."""
        now, before, self._observed_at = boot_seconds(), self._observed_at, 0.0
        observed = await observe_heartbeats(
            conn,
            shard=self._shard,
            epoch=epoch,
            elapsed=now - before if before else 0.0,
            lost_after=self._settings.lost_after_seconds,
        )
        self._observed_at = now
        return Again(also={"reap": [*observed.silent, *observed.stranded]})

    def forget_observation(self) -> None:
        """The poll has observed heartbeats since, or it is not known whether: counting starts again."""
        self._observed_at = 0.0

    async def reap(self, conn: AsyncConnection, epoch: int, session: int) -> Again:
        settings = self._settings
        done = await reap_runner(
            conn,
            shard=self._shard,
            epoch=epoch,
            session=session,
            lost_after=settings.lost_after_seconds,
            infra_retries=settings.infra_retries,
        )
        if done.reaped is None:
            return Again()  # a heartbeat arrived meanwhile
        metrics.AGENT_LOST.inc(done.reaped)
        self._count_refused("run", done.refused, verb="reap")
        self._log.error("runner_lost", session=session, attempts=done.reaped)
        self._waker.wake(Channel.TASKS)
        return Again()

    async def time_out_run(self, conn: AsyncConnection, epoch: int, run_id: int) -> Again:
        asked = await time_out_run(conn, shard=self._shard, epoch=epoch, run_id=run_id)
        if asked is None:
            return Again()
        if asked < 0:
            self._count_refused("run", 1, verb="time_out")
            return Again()
        metrics.TIMEOUTS.labels(kind="run").inc()
        self._log.warning("run_timed_out", run=run_id, asked_to_stop=asked)
        if asked:
            self._waker.wake(Channel.STOP)
        return Again()

    async def time_out_queued_tasks(self, conn: AsyncConnection, epoch: int) -> Again:
        done = await time_out_waits(conn, shard=self._shard, epoch=epoch, batch=self._settings.promote_batch)
        self._count_refused("run", done.refused, verb="time_out")
        if done.failed:
            metrics.TIMEOUTS.labels(kind="queue_wait").inc(done.failed)
            self._log.warning("task_queue_timed_out", tasks=done.failed)
            self._waker.wake(Channel.TASKS)
        return Again()

    async def deliver_dependencies(self, conn: AsyncConnection, epoch: int) -> Again:
        done = await deliver_dependencies(conn, shard=self._shard, epoch=epoch, batch=self._settings.promote_batch)
        if done.became_due:
            self._waker.wake(Channel.SCHEDULE)
        return Again(in_seconds=0.0) if done.has_more else Again()

    async def wake_deferred_tasks(self, conn: AsyncConnection, epoch: int) -> Again:
        done = await wake(conn, shard=self._shard, epoch=epoch, batch=self._settings.promote_batch)
        self._count_refused("run", done.refused, verb="wake")
        if done.looked_at:
            self._waker.wake(Channel.TASKS)
        # The result of one wait may end the next. A wait that is due and was skipped is locked by another transaction.
        return at_instant(done.next_wake, in_seconds=0.0 if done.looked_at else LATER_SECONDS)

    async def admit_queued_runs(self, conn: AsyncConnection, epoch: int) -> Again:
        done = await admit(conn, shard=self._shard, epoch=epoch)
        self._count_refused("dag", done.refused, verb="admit")
        if not done.admitted:
            return Again()
        self._waker.wake(Channel.TASKS)
        return Again(also={"wake": []})

    async def advance_backfill(self, conn: AsyncConnection, epoch: int, backfill_id: int) -> Again:
        done = await advance(conn, shard=self._shard, epoch=epoch, backfill_id=backfill_id)
        if done.made:
            metrics.BACKFILL_RUNS.inc(done.made)
            self._waker.wake(Channel.TASKS)
        # Soon again while there is progress; otherwise the leader's next poll reports whether there is work.
        has_progress = (done.moved or done.ended) and not done.is_over
        return Again(in_seconds=SOON_SECONDS if has_progress else inf, also={"wake": []} if done.made else {})

    async def admit_gated_tasks(self, conn: AsyncConnection, epoch: int) -> Again:
        done = await admit_gated_tasks(conn, shard=self._shard, epoch=epoch, batch=self._settings.promote_batch)
        if done.admitted:
            self._waker.wake(Channel.TASKS)
        return at_instant(done.next_opening, in_seconds=SOON_SECONDS)

    async def rebalance_shard(self, conn: AsyncConnection, epoch: int) -> Again:
        """Move rows that belong to another shard since the number of shards changed. Other jobs run between two
        batches."""
        done = await rebalance_shard(conn, shard=self._shard, epoch=epoch, batch=MOVES_AT_ONCE)
        if done.moved:
            metrics.SHARD_MOVES.inc(done.moved)
            self._log.info("shard_rebalanced", shard=self._shard, moved=done.moved)
            self._waker.wake(Channel.SCHEDULE)
            return Again(in_seconds=SOON_SECONDS)
        if done.is_over:
            return Again(is_shard_closed=done.is_closed)
        return Again(in_seconds=MOVES_SECONDS)

    async def raise_alerts(self, conn: AsyncConnection, epoch: int) -> Again:
        """Raise an alert for schedules, runs and tasks that miss their deadline."""
        changes = await raise_alerts(
            conn, shard=self._shard, epoch=epoch, unfired_seconds=UNFIRED_SECONDS, batch=ALERTS_AT_ONCE
        )
        for each in changes:
            fields = {"dag": each.dag, "schedule": each.schedule, "run": each.run_id}
            if each.task is not None:
                fields["task"] = each.task
            if each.has_ended:
                self._log.info("alert_resolved", kind=each.kind, **fields)
            else:
                metrics.ALERTS.labels(kind=each.kind).inc()
                self._log.error("alert_raised", kind=each.kind, **fields)
        return Again(in_seconds=ALERT_SECONDS)

    def _count_refused(self, kind: str, count: int, *, verb: str) -> None:
        if count:
            metrics.QUARANTINED.labels(kind=kind).inc(count)
            self._log.error("row_quarantined", kind=kind, count=count, verb=verb)
