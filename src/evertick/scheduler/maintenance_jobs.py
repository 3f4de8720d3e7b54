"""The bodies of the leader's maintenance jobs: each calls one verb of the engine, counts and logs what it changed, and
notifies the processes that can act on that. When a job is due is decided in `maintenance`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf

import psycopg
from psycopg import AsyncConnection, errors

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import runs
from evertick.domain.errors import NotLeader
from evertick.engine import maintenance as engine_maintenance
from evertick.engine.backfills import advance
from evertick.engine.gates import admit_gated_tasks, reconcile_gates, release_admissions
from evertick.engine.inbound.events import route_events
from evertick.engine.inbound.requests import start_delayed_runs, take_requests
from evertick.engine.maintenance import (
    deliver_dependencies,
    fail_orphaned_run,
    map_arrivals,
    promote_due_tasks,
    raise_alerts,
    reconcile_runs,
    skip_run_once,
    time_out_run,
)
from evertick.engine.monitoring.checkins import raise_late_checkins
from evertick.engine.monitoring.lineage import enqueue_lineage
from evertick.engine.runners import reap_runner
from evertick.engine.shards import observe_heartbeats, rebalance_shard
from evertick.engine.waits import wake
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runtime.connections import Notifier
from evertick.scheduler.leadership import LeaderKey

# Retries that wait for a free slot, or whose run is locked: soon after progress, later without.
SOON_SECONDS, LATER_SECONDS = 0.02, 0.1
# How many rows change their shard in one transaction, and how often a leader checks for more after it found none.
MOVES_AT_ONCE, MOVES_SECONDS = 500, 5.0
# Alerts are for people: a delay of a few seconds does not matter.
ALERT_SECONDS = 5.0
CHECKIN_SECONDS = 10.0
LINEAGE_SECONDS = 10.0
LINEAGE_AT_ONCE = 100
# No transaction that ends a run takes so long: none is passed over because its commit was late.
LINEAGE_SETTLED_SECONDS = 60.0
# A change of leader takes up to 6 s, and a locked schedule can take a few more.
UNFIRED_SECONDS = 60.0
ALERTS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """When a job is due again: after `in_seconds`, and not before `at` by the database's clock. Without either, when the
    leader's next poll reports work, as without a Rerun. `also`: other jobs that are due now, with their candidates."""

    in_seconds: float = inf
    at: datetime | None = None
    also: Mapping[str, list[int]] = field(default_factory=dict)
    is_shard_closed: bool = False


def at_instant(instant: datetime | None, *, in_seconds: float) -> Rerun:
    """At that instant, if there is one, and at the earliest after `in_seconds`."""
    return Rerun() if instant is None else Rerun(in_seconds=in_seconds, at=instant)


def log_quarantined(log: Log, *, kind: str, verb: str, count: int | None = None, **row: int) -> None:
    """As many rows as `count` says, which may be none, or one row."""
    if count != 0:
        metrics.QUARANTINED.labels(kind=kind).inc(count or 1)
        log.error("row_quarantined", kind=kind, **({"count": count} if count else row), verb=verb)


class MaintenanceJobs:
    """The jobs of one shard."""

    def __init__(self, settings: Settings, *, notifier: Notifier, log: Log) -> None:
        self._settings, self._notifier, self._log = settings, notifier, log
        self._batch = settings.promote_batch
        self._observed_at = 0.0

    async def promote(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        done = await promote_due_tasks(conn, **leader, limit=self._batch, bound=self._settings.max_active_retries)
        log_quarantined(self._log, kind="run", count=done.refused, verb="promote")
        if done.promoted:
            self._notifier.wake(Channel.TASKS)
        pause = SOON_SECONDS if done.promoted else LATER_SECONDS
        return Rerun(in_seconds=pause) if done.has_waiting_retries else at_instant(done.next_due, in_seconds=pause)

    async def observe_heartbeats(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        """The fallback when the leader's poll could not observe heartbeats."""
        now, before, self._observed_at = boot_seconds(), self._observed_at, 0.0
        elapsed = now - before if before else 0.0
        lost_after = self._settings.lost_after_seconds
        observed = await observe_heartbeats(conn, **leader, elapsed=elapsed, lost_after=lost_after)
        self._observed_at = now
        return Rerun(also={"reap": [*observed.silent_sessions, *observed.dead_sessions]})

    def forget_observation(self) -> None:
        """The poll has observed heartbeats since, or it is not known whether: counting starts again."""
        self._observed_at = 0.0

    async def enqueue_lineage(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        url = self._settings.openlineage_url
        if leader["shard"] != 0 or url is None:
            return Rerun()
        done = await enqueue_lineage(
            conn, **leader, sink=f"openlineage:{url}", limit=LINEAGE_AT_ONCE, settle_seconds=LINEAGE_SETTLED_SECONDS
        )
        return Rerun(in_seconds=SOON_SECONDS if done.runs == LINEAGE_AT_ONCE else LINEAGE_SECONDS)

    async def raise_late_checkins(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        if leader["shard"] != 0:
            return Rerun()
        for name in await raise_late_checkins(conn, **leader):
            metrics.ALERTS.labels(kind="no_checkin").inc()
            self._log.error("checkin_missed", checkin=name)
        return Rerun(in_seconds=CHECKIN_SECONDS)

    async def reap(self, conn: AsyncConnection, leader: LeaderKey, session: int) -> None:
        lost_after, infra_retries = self._settings.lost_after_seconds, self._settings.infra_retries
        done = await reap_runner(conn, **leader, session=session, lost_after=lost_after, infra_retries=infra_retries)
        if done.reaped is not None:  # otherwise a heartbeat arrived meanwhile
            metrics.AGENT_LOST.inc(done.reaped)
            log_quarantined(self._log, kind="run", count=done.refused, verb="reap")
            self._log.error("runner_lost", session=session, attempts=done.reaped)
            self._notifier.wake(Channel.TASKS)

    async def time_out_run(self, conn: AsyncConnection, leader: LeaderKey, run_id: int) -> None:
        asked = await time_out_run(conn, **leader, run_id=run_id)
        if asked is None:
            return
        if asked < 0:
            log_quarantined(self._log, kind="run", count=1, verb="time_out")
            return
        metrics.TIMEOUTS.labels(kind="run").inc()
        self._log.warning("run_timed_out", run=run_id, asked_to_stop=asked)
        if asked:
            self._notifier.wake(Channel.STOP)

    async def time_out_queued_tasks(self, conn: AsyncConnection, leader: LeaderKey) -> None:
        done = await engine_maintenance.time_out_queued_tasks(conn, **leader, limit=self._batch)
        log_quarantined(self._log, kind="run", count=done.refused, verb="time_out")
        if done.failed:
            metrics.TIMEOUTS.labels(kind="queue_wait").inc(done.failed)
            self._log.warning("task_queue_timed_out", tasks=done.failed)
            self._notifier.wake(Channel.TASKS)

    async def deliver_dependencies(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        done = await deliver_dependencies(conn, **leader, limit=self._batch)
        became_due, has_more = done.became_due, done.has_more
        if done.has_partitions:
            mapped = await map_arrivals(conn, **leader, limit=self._batch)
            became_due, has_more = became_due + mapped.became_due, has_more or mapped.mapped > 0
        if became_due:
            self._notifier.wake(Channel.SCHEDULE)
        return Rerun(in_seconds=0.0) if has_more else Rerun()

    async def wake_deferred_tasks(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        done = await wake(conn, **leader, batch=self._batch)
        log_quarantined(self._log, kind="run", count=done.refused, verb="wake")
        if done.looked_at:
            self._notifier.wake(Channel.TASKS)
        # The result of one wait may end the next. A wait that is due and was skipped is locked by another transaction.
        return at_instant(done.next_wake, in_seconds=0.0 if done.looked_at else LATER_SECONDS)

    async def take_requests(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        """Delayed runs whose time has come begin, and events and requests of the inbox become runs."""
        routed = await route_events(conn, **leader, limit=self._batch)
        taken = await take_requests(conn, **leader, limit=self._batch)
        found = [each for each in (routed, taken) if each is not None]
        if any(each.made for each in found):
            self._notifier.wake(Channel.TASKS)
        if dead := sum(each.dead for each in found):
            metrics.DEAD_LETTERS.inc(dead)
            self._log.warning("requests_refused", count=dead, advice="list them with `evertick dead-letters list`")
        done = await start_delayed_runs(conn, **leader, limit=self._batch)
        if done.started:
            self._notifier.wake(Channel.TASKS)
        # A run that begins may wait for something outside. Both are read until nothing is left.
        also: dict[str, list[int]] = {"wake": []} if done.defers or any(each.defers for each in found) else {}
        if found:
            return Rerun(in_seconds=0.0, also=also)
        return replace(at_instant(done.next_start, in_seconds=SOON_SECONDS), also=also)

    async def admit_queued_runs(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        done = await engine_maintenance.admit_queued_runs(conn, **leader)
        log_quarantined(self._log, kind="dag", count=done.refused, verb="admit")
        if not done.admitted:
            return Rerun()
        self._notifier.wake(Channel.TASKS)
        return Rerun(also={"wake": []})

    async def advance_backfill(self, conn: AsyncConnection, leader: LeaderKey, backfill_id: int) -> Rerun:
        done = await advance(conn, **leader, backfill_id=backfill_id)
        if done.made:
            metrics.BACKFILL_RUNS.inc(done.made)
            self._notifier.wake(Channel.TASKS)
        # Soon again while there is progress; otherwise the leader's next poll reports whether there is work.
        has_progress = (done.moved or done.ended) and not done.is_over
        return Rerun(in_seconds=SOON_SECONDS if has_progress else inf, also={"wake": []} if done.made else {})

    async def admit_gated_tasks(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        done = await admit_gated_tasks(conn, **leader, limit=self._batch)
        if done.admitted:
            self._notifier.wake(Channel.TASKS)
        return at_instant(done.next_opening, in_seconds=SOON_SECONDS)

    async def rebalance_shard(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        """Move rows that belong to another shard since the number of shards changed. Other jobs run between two
        batches."""
        done = await rebalance_shard(conn, **leader, limit=MOVES_AT_ONCE)
        if done.moved:
            metrics.SHARD_MOVES.inc(done.moved)
            self._log.info("shard_rebalanced", shard=leader["shard"], moved=done.moved)
            self._notifier.wake(Channel.SCHEDULE)
            return Rerun(in_seconds=SOON_SECONDS)
        return Rerun(is_shard_closed=done.is_closed) if done.is_over else Rerun(in_seconds=MOVES_SECONDS)

    async def raise_alerts(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        """Raise an alert for schedules, runs and tasks that miss their deadline."""
        for each in await raise_alerts(conn, **leader, unfired_seconds=UNFIRED_SECONDS, limit=ALERTS_AT_ONCE):
            fields = {"dag": each.dag, "schedule": each.schedule, "run": each.run_id}
            if each.task is not None:
                fields["task"] = each.task
            if each.has_ended:
                self._log.info("alert_resolved", kind=each.kind, **fields)
            else:
                metrics.ALERTS.labels(kind=each.kind).inc()
                self._log.error("alert_raised", kind=each.kind, **fields)
        return Rerun(in_seconds=ALERT_SECONDS)


SLICE_PAUSE_SECONDS = 0.02
# Counting queued tasks is expensive where the queue is long; it is done in the first round and then in every tenth.
LINE_ROUNDS = 10
BEGINNING = (0, 0)
GATES_AT_ONCE = 5000


class Reconciliation:
    """The rounds over the open runs of one shard: they repair inconsistencies, and fail runs that cannot be repaired.

    A round begins at once after a takeover, then every `reconcile_seconds`, in slices with pauses, so that it stays a
    small share of the load in a large installation. `run_slice` is one slice; after the last one of a round follow
    `fail_orphaned_runs` and `count_gates`.
    """

    def __init__(self, settings: Settings, *, notifier: Notifier, log: Log) -> None:
        self._settings, self._notifier, self._log = settings, notifier, log
        self._batch = settings.reconcile_batch
        self.begin()

    def begin(self) -> None:
        """Leadership begins: the next slice starts a round. Changes before it were not observed."""
        self._after = BEGINNING
        self._began_at, self._elapsed, self._rounds = 0.0, 0.0, 0

    async def run_slice(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        try:
            await self._reconcile(conn, leader)
        except BaseException:
            # Observation was interrupted: nothing of this round counts as observed.
            self._began_at = self._elapsed = 0.0
            raise
        if self._after != BEGINNING:
            return Rerun(in_seconds=SLICE_PAUSE_SECONDS)
        next_at = self._began_at + self._settings.reconcile_seconds
        return Rerun(in_seconds=max(0.0, next_at - boot_seconds()), also={"orphans": [], "count_gates": []})

    async def _reconcile(self, conn: AsyncConnection, leader: LeaderKey) -> None:
        """Advance to the next slice; after the last one, to the beginning."""
        now = boot_seconds()
        if self._after == BEGINNING:
            # A round may be late, but time without observation does not count.
            most = 3 * self._settings.reconcile_seconds
            self._elapsed = min(now - self._began_at, most) if self._began_at else 0.0
            self._began_at = now
        after_dag, after_run = self._after
        try:
            done = await reconcile_runs(
                conn,
                **leader,
                after_dag=after_dag,
                after_run=after_run,
                limit=self._batch,
                elapsed=self._elapsed,
                counts_line=self._rounds % LINE_ROUNDS == 0,
            )
        except errors.QueryCanceled:
            # This many take longer than the timeout: continue one by one. A run that takes too long alone is skipped.
            if self._batch > 1:
                self._batch = 1
                raise
            self._after = (await skip_run_once(conn, **leader, after_dag=after_dag, after_run=after_run)).last
            log_quarantined(self._log, kind="run", run=self._after[1], verb="reconcile")
            return
        self._batch = min(self._batch * 2, self._settings.reconcile_batch)
        self._after = done.last
        log_quarantined(self._log, kind="run", count=done.refused, verb="reconcile")
        if done.repaired:
            for kind in done.repaired:
                metrics.DRIFT_REPAIRED.labels(kind=kind).inc()
            self._log.warning("drift_repaired", repaired=sorted(set(done.repaired)), count=len(done.repaired))
            self._notifier.wake(Channel.TASKS)
        self._rounds += done.last == BEGINNING

    async def count_gates(self, conn: AsyncConnection, leader: LeaderKey) -> None:
        """Check all gates, slice by slice; before that, release the admissions of tasks that no runner can claim."""
        grace, limit = self._settings.release_after_seconds, self._settings.promote_batch
        if released := await release_admissions(conn, **leader, grace=grace, limit=limit):
            self._log.warning("admissions_released", tasks=released, reason="no live runner serves their queue")
        after: int | None = 0
        admitted = 0
        while after is not None:
            done = await reconcile_gates(conn, **leader, after=after, limit=GATES_AT_ONCE)
            after, admitted = done.last_gate_id, admitted + done.admitted
            if done.drifted:
                metrics.GATE_DRIFT.inc(done.drifted)
                self._log.error("gate_drift_repaired", gates=done.drifted)
        if admitted or released:
            self._notifier.wake(Channel.TASKS)

    async def fail_orphaned_runs(self, conn: AsyncConnection, leader: LeaderKey) -> None:
        """Fail runs that can no longer make progress."""
        after = self._settings.orphan_after_seconds
        try:
            found = await runs.orphans(conn, shard=leader["shard"], orphan_after=after)
        except psycopg.Error:
            metrics.ORPHAN_LIST_ERROR.inc()
            raise
        for run_id in found:
            try:
                done = await fail_orphaned_run(conn, **leader, run_id=run_id, after=after)
            except psycopg.Error as error:
                metrics.ORPHAN_REAP_ERROR.inc()
                if conn.closed or conn.broken:
                    raise
                self._log.error("orphan_check_failed", run=run_id, error=error)
                continue
            except NotLeader:
                raise
            except Exception:
                metrics.ORPHAN_PANIC.inc()
                raise
            if done == "reaped":
                metrics.ORPHAN_REAPED.inc()
                self._log.error("run_orphaned", run=run_id, after_seconds=after)
            elif done == "refused":
                metrics.ORPHAN_REAP_ERROR.inc()
                log_quarantined(self._log, kind="run", run=run_id, verb="reap")
