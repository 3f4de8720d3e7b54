"""The reconciliation round over open runs: repairs inconsistencies, and fails runs that cannot be repaired.

Runs at once after a takeover, then every `reconcile_seconds`, in slices with pauses, so that it stays a small share of
the load in a large installation.
"""

from __future__ import annotations

import psycopg
from psycopg import AsyncConnection, errors

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import runs
from evertick.domain.errors import NotLeader
from evertick.engine.gates import reconcile_gates, release_admissions
from evertick.engine.maintenance import reconcile, skip_one
from evertick.engine.runners import reap_orphan
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import boot_seconds
from evertick.runtime.connections import Notifier
from evertick.scheduler.maintenance_jobs import Again

SLICE_PAUSE_SECONDS = 0.02
# Counting queued tasks is expensive where the queue is long; it is done in the first round and then in every tenth.
LINE_ROUNDS = 10
BEGINNING = (0, 0)
GATES_AT_ONCE = 5000


class Reconciliation:
    """The rounds of one shard. `run_slice` is one slice; after the last one of a round follow `fail_orphaned_runs` and
    `count_gates`."""

    def __init__(self, settings: Settings, *, shard: int, waker: Notifier, log: Log) -> None:
        self._settings, self._shard, self._waker, self._log = settings, shard, waker, log
        self._batch = settings.reconcile_batch
        self.begin()

    def begin(self) -> None:
        """Leadership begins: the next slice starts a round. Changes before it were not observed."""
        self._after = BEGINNING
        self._began_at, self._elapsed, self._rounds = 0.0, 0.0, 0

    async def run_slice(self, conn: AsyncConnection, epoch: int) -> Again:
        try:
            is_over = await self._reconcile(conn, epoch)
        except BaseException:
            # Observation was interrupted: nothing of this round counts as observed.
            self._began_at = self._elapsed = 0.0
            raise
        if not is_over:
            return Again(in_seconds=SLICE_PAUSE_SECONDS)
        next_at = self._began_at + self._settings.reconcile_seconds
        return Again(in_seconds=max(0.0, next_at - boot_seconds()), also={"orphans": [], "count_gates": []})

    async def _reconcile(self, conn: AsyncConnection, epoch: int) -> bool:
        """Returns whether the round is over."""
        now = boot_seconds()
        if self._after == BEGINNING:
            # A round may be late, but time without observation does not count.
            most = 3 * self._settings.reconcile_seconds
            self._elapsed = min(now - self._began_at, most) if self._began_at else 0.0
            self._began_at = now
        try:
            done = await reconcile(
                conn,
                shard=self._shard,
                epoch=epoch,
                after=self._after,
                batch=self._batch,
                elapsed=self._elapsed,
                counts_line=self._rounds % LINE_ROUNDS == 0,
            )
        except errors.QueryCanceled:
            # This many take longer than the timeout: continue one by one. A run that takes too long alone is skipped.
            if self._batch > 1:
                self._batch = 1
                raise
            self._after = await skip_one(conn, shard=self._shard, epoch=epoch, after=self._after)
            metrics.QUARANTINED.labels(kind="run").inc()
            self._log.error("row_quarantined", kind="run", run=self._after[1], verb="reconcile")
            return self._after == BEGINNING
        self._batch = min(self._batch * 2, self._settings.reconcile_batch)
        self._after = done.last
        if done.refused:
            metrics.QUARANTINED.labels(kind="run").inc(done.refused)
            self._log.error("row_quarantined", kind="run", count=done.refused, verb="reconcile")
        if done.repaired:
            for kind in done.repaired:
                metrics.DRIFT_REPAIRED.labels(kind=kind).inc()
            self._log.warning("drift_repaired", repaired=sorted(set(done.repaired)), count=len(done.repaired))
            self._waker.wake(Channel.TASKS)
        self._rounds += done.last == BEGINNING
        return done.last == BEGINNING

    async def count_gates(self, conn: AsyncConnection, epoch: int) -> Again:
        """Check all gates, slice by slice; before that, release the admissions of tasks that no runner can claim."""
        grace = self._settings.release_after_seconds
        released = await release_admissions(
            conn, shard=self._shard, epoch=epoch, grace=grace, batch=self._settings.promote_batch
        )
        if released:
            self._log.warning("admissions_released", tasks=released, reason="no live runner serves their queue")
        after: int | None = 0
        admitted = 0
        while after is not None:
            done = await reconcile_gates(conn, shard=self._shard, epoch=epoch, after=after, batch=GATES_AT_ONCE)
            after, admitted = done.last_gate_id, admitted + done.admitted
            if done.drifted:
                metrics.GATE_DRIFT.inc(done.drifted)
                self._log.error("gate_drift_repaired", gates=done.drifted)
        if admitted or released:
            self._waker.wake(Channel.TASKS)
        return Again()

    async def fail_orphaned_runs(self, conn: AsyncConnection, epoch: int) -> Again:
        """Fail runs that can no longer make progress."""
        try:
            found = await runs.orphans(conn, shard=self._shard, orphan_after=self._settings.orphan_after_seconds)
        except psycopg.Error:
            metrics.ORPHAN_LIST_ERROR.inc()
            raise
        for run_id in found:
            try:
                await self._fail_orphan(conn, epoch, run_id)
            except psycopg.Error as error:
                metrics.ORPHAN_REAP_ERROR.inc()
                if conn.closed or conn.broken:
                    raise
                self._log.error("orphan_check_failed", run=run_id, error=error)
            except NotLeader:
                raise
            except Exception:
                metrics.ORPHAN_PANIC.inc()
                raise
        return Again()

    async def _fail_orphan(self, conn: AsyncConnection, epoch: int, run_id: int) -> None:
        settings = self._settings
        done = await reap_orphan(
            conn, shard=self._shard, epoch=epoch, run_id=run_id, orphan_after=settings.orphan_after_seconds
        )
        if done == "reaped":
            metrics.ORPHAN_REAPED.inc()
            self._log.error("run_orphaned", run=run_id, after_seconds=settings.orphan_after_seconds)
        elif done == "refused":
            metrics.ORPHAN_REAP_ERROR.inc()
            metrics.QUARANTINED.labels(kind="run").inc()
            self._log.error("row_quarantined", kind="run", run=run_id, verb="reap")
