"""The reconciliation round over open runs: repairs inconsistencies, and fails runs that cannot be repaired.

Runs at once after a takeover, then every `reconcile_seconds`, in slices with pauses, so that it stays a small share of
the load in a large installation.
"""

from __future__ import annotations

from math import inf

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
from evertick.runtime.circuit_breaker import CircuitBreaker, boot_seconds
from evertick.runtime.connections import Notifier
from evertick.scheduler.leadership import Leadership

SLICE_PAUSE_SECONDS = 0.02
# Counting queued tasks is expensive where the queue is long; it is done in the first round and then in every tenth.
LINE_ROUNDS = 10
BEGINNING = (0, 0)
GATES_AT_ONCE = 5000


class Reconciliation:
    def __init__(self, settings: Settings, *, lead: Leadership, waker: Notifier, log: Log) -> None:
        self._settings, self._lead, self._waker, self._log = settings, lead, waker, log
        self._reconciling = CircuitBreaker("reconcile", log=log)
        self._reaping = CircuitBreaker("orphans", log=log)
        self._counting = CircuitBreaker("gates", log=log)
        self._batch = settings.reconcile_batch
        self.begin()

    def begin(self) -> None:
        """Leadership begins: start a round now. Changes before it were not observed."""
        self._after, self._slice_at = BEGINNING, 0.0
        self._began_at, self._elapsed, self._rounds = 0.0, 0.0, 0

    @property
    def next_at(self) -> float:
        return max(self._slice_at, self._reconciling.rests_until)

    async def attempt(self, conn: AsyncConnection) -> None:
        """One slice, if it is due. After the last slice of a round: orphaned runs."""
        if boot_seconds() < self.next_at:
            return
        self._slice_at = inf
        is_over = await self._reconciling.attempt(conn, lambda: self._reconcile(conn))
        if is_over is None:
            # Observation was interrupted: nothing of this round counts as observed.
            self._began_at, self._elapsed, self._slice_at = 0.0, 0.0, boot_seconds()
        elif is_over:
            self._slice_at = self._began_at + self._settings.reconcile_seconds
            if not self._reaping.is_resting:
                await self._reaping.attempt(conn, lambda: self._reap_orphans(conn))
            if not self._counting.is_resting:
                await self._counting.attempt(conn, lambda: self._count_gates(conn))
        else:
            self._slice_at = boot_seconds() + SLICE_PAUSE_SECONDS

    async def _reconcile(self, conn: AsyncConnection) -> bool:
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
                shard=self._lead.shard,
                epoch=self._epoch,
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
            self._after = await skip_one(conn, shard=self._lead.shard, epoch=self._epoch, after=self._after)
            metrics.QUARANTINED.labels(kind="run").inc()
            self._log.error("quarantine", kind="run", run=self._after[1], verb="reconcile")
            return self._after == BEGINNING
        self._batch = min(self._batch * 2, self._settings.reconcile_batch)
        self._after = done.last
        if done.refused:
            metrics.QUARANTINED.labels(kind="run").inc(done.refused)
            self._log.error("quarantine", kind="run", count=done.refused, verb="reconcile")
        if done.repaired:
            for kind in done.repaired:
                metrics.DRIFT_REPAIRED.labels(kind=kind).inc()
            self._log.warning("reconcile", repaired=sorted(set(done.repaired)), count=len(done.repaired))
            self._waker.wake(Channel.READY)
        self._rounds += done.last == BEGINNING
        return done.last == BEGINNING

    async def _count_gates(self, conn: AsyncConnection) -> None:
        """Check all gates, slice by slice; before that, release the admissions of tasks that no runner can claim."""
        grace = self._settings.unadmit_after_seconds
        taken_back = await release_admissions(
            conn, shard=self._lead.shard, epoch=self._epoch, grace=grace, batch=self._settings.promote_batch
        )
        if taken_back:
            self._log.warning("unadmit", tasks=taken_back, reason="no live runner serves their queue")
        after: int | None = 0
        admitted = 0
        while after is not None:
            done = await reconcile_gates(
                conn, shard=self._lead.shard, epoch=self._epoch, after=after, batch=GATES_AT_ONCE
            )
            after, admitted = done.last_gate_id, admitted + done.admitted
            if done.drifted:
                metrics.GATE_DRIFT.inc(done.drifted)
                self._log.error("gate_drift", gates=done.drifted)
        if admitted or taken_back:
            self._waker.wake(Channel.READY)

    async def _reap_orphans(self, conn: AsyncConnection) -> None:
        try:
            found = await runs.orphans(conn, shard=self._lead.shard, orphan_after=self._settings.orphan_after_seconds)
        except psycopg.Error:
            metrics.ORPHAN_LIST_ERROR.inc()
            raise
        for run_id in found:
            try:
                await self._reap_orphan(conn, run_id)
            except psycopg.Error as error:
                metrics.ORPHAN_REAP_ERROR.inc()
                if conn.closed or conn.broken:
                    raise
                self._log.error("orphan_refused", run=run_id, error=error)
            except NotLeader:
                raise
            except Exception:
                metrics.ORPHAN_PANIC.inc()
                raise

    async def _reap_orphan(self, conn: AsyncConnection, run_id: int) -> None:
        settings = self._settings
        done = await reap_orphan(
            conn, shard=self._lead.shard, epoch=self._epoch, run_id=run_id, orphan_after=settings.orphan_after_seconds
        )
        if done == "reaped":
            metrics.ORPHAN_REAPED.inc()
            self._log.error("orphaned", run=run_id, after_seconds=settings.orphan_after_seconds)
        elif done == "refused":
            metrics.ORPHAN_REAP_ERROR.inc()
            metrics.QUARANTINED.labels(kind="run").inc()
            self._log.error("quarantine", kind="run", run=run_id, verb="reap")

    @property
    def _epoch(self) -> int:
        if self._lead.epoch is None:
            raise NotLeader(f"shard {self._lead.shard} is led by another scheduler")
        return self._lead.epoch
