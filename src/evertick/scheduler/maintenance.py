"""The leader's maintenance: promote, reap, time out, admit, advance backfills, reconcile.

On its own connection, so that it cannot delay a fire. It queries nothing to find work: the leader's poll reports what
is pending, and only the reconciliation round has its own timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from math import inf

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries.shards import PendingWork
from evertick.domain.errors import NotLeader
from evertick.engine.backfills import advance
from evertick.engine.gates import admit_gated_tasks
from evertick.engine.maintenance import (
    admit,
    deliver_dependencies,
    promote,
    rebalance_shard,
    time_out_run,
    time_out_waits,
)
from evertick.engine.runners import observe_heartbeats, reap_runner
from evertick.engine.waits import wake
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import CircuitBreaker, CircuitBreakers, boot_seconds
from evertick.runtime.connections import Notifier
from evertick.runtime.loop import run_loop
from evertick.scheduler.leadership import LeaderConnection, Leadership
from evertick.scheduler.maintenance_jobs import Alerting
from evertick.scheduler.reconciliation import Reconciliation

# Retries that wait for a free slot, or whose run is locked: soon after progress, later without.
SOON_SECONDS, LATER_SECONDS = 0.02, 0.1
# How many rows change their shard in one transaction, and how often a leader checks for more after it found none.
MOVES_AT_ONCE, MOVES_SECONDS = 500, 5.0
# Share of a job's time: how long it may wait for one lock.
LOCK_SHARE = 0.5


class Maintenance:
    """`on_refused` is called when the database answers that another scheduler leads, `on_closed` when the shard is
    closed."""

    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        lead: Leadership,
        waker: Notifier,
        on_refused: Callable[[], None],
        on_closed: Callable[[], None],
        log: Log,
    ) -> None:
        self._settings, self._lead, self._waker, self._log = settings, lead, waker, log
        self._on_refused, self._on_closed = on_refused, on_closed
        self._link = LeaderConnection(url, lead, settings, lock_share=LOCK_SHARE)
        self._each = {name: CircuitBreakers(name, log=log) for name in ("reap", "time_out", "backfill")}
        self._steps = {
            name: CircuitBreaker(name, log=log) for name in ("promote", "admit", "hear", "wake", "gates", "move_out")
        }
        self._steps |= {name: each.whole for name, each in self._each.items()}
        self._repairing = Reconciliation(settings, lead=lead, waker=waker, log=log)
        self._alerting = Alerting(lead=lead, log=log)
        self._wake = asyncio.Event()
        self._read_at: tuple[datetime, float] | None = None
        self.begin()

    def begin(self) -> None:
        """Leadership begins: discard all earlier knowledge, and run every job once."""
        self._promote_at = self._expire_at = self._opens_at = self._wake_at = inf
        self._sessions: list[int] = []
        self._overdue: list[int] = []
        self._backfills: list[int] = []
        self._backfill_at = self._move_at = inf
        self._has_room = self._has_arrivals = self._has_gates = self._listens = False
        self._listened_at = 0.0
        self._repairing.begin()
        self._alerting.begin()

    def hear(self, seen: PendingWork) -> None:
        """The leader's latest poll."""
        now = boot_seconds()
        self._read_at = (seen.read_at, now)
        for trouble in seen.troubles:
            self._complain(*trouble.split(": ", 1))
        self._promote_at = min(self._boot_time(seen.next_timer), now if seen.has_line else inf)
        self._expire_at = self._boot_time(seen.next_expiry)
        self._sessions = [*(seen.silent or []), *(seen.stranded or [])]
        self._overdue, self._has_room = seen.overdue or [], bool(seen.with_room)
        self._backfills = seen.backfills or []
        self._backfill_at = now if self._backfills else inf
        self._has_arrivals = bool(seen.has_arrivals)
        self._wake_at = self._boot_time(seen.next_wake)
        self._has_gates = bool(seen.has_gates)
        self._opens_at = self._boot_time(seen.next_opening)
        if seen.has_moves is not None:
            self._move_at = (now if self._move_at == inf else self._move_at) if seen.has_moves else inf
        self._listens = seen.silent is None and seen.stranded is None and not seen.troubles
        if not self._listens:
            self._listened_at = 0.0
        if self._next_at() <= now:
            self._wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        never = asyncio.Event()
        await run_loop(self.tick, wake=self._wake, stop=never, name=self._lead.loop_name("tend"), log=self._log)

    async def tick(self) -> float:
        """Run every job that is due, once."""
        if self._lead.may_plan and self._next_at() <= boot_seconds():
            try:
                await self._tend(await self._link.get())
            except NotLeader as error:
                self._log.warning("refused", error=error)
                self.begin()
                self._on_refused()
        if self._lead.epoch is None:
            await self._link.close()
        rest = self._next_at() - boot_seconds() if self._lead.may_plan else inf
        return max(0.0, min(rest, self._settings.tick_seconds))

    async def close(self) -> None:
        await self._link.close()

    async def _tend(self, conn: AsyncConnection) -> None:
        now = boot_seconds()
        if self._promote_at <= now:
            await self._step("promote", conn, self._promote)
        if self._listens:
            self._listens = False
            await self._step("reap", conn, self._listen)
        sessions, self._sessions = self._sessions, []
        await self._for_each("reap", conn, sessions, self._reap)
        overdue, self._overdue = self._overdue, []
        await self._for_each("time_out", conn, overdue, self._time_out)
        if self._expire_at <= now:
            self._expire_at = inf
            await self._step("time_out", conn, self._time_out_waits)
        if self._has_arrivals:
            self._has_arrivals = False
            await self._step("hear", conn, self._hear)
        if self._wake_at <= now:
            await self._step("wake", conn, self._wake_tasks)
        if self._has_room:
            self._has_room = False
            await self._step("admit", conn, self._admit)
        if self._backfill_at <= now:
            self._backfill_at = inf
            await self._for_each("backfill", conn, self._backfills, self._move_on)
        if self._has_gates or self._opens_at <= now:
            self._has_gates, self._opens_at = False, inf
            await self._step("gates", conn, self._tend_gates)
        if self._move_at <= now:
            await self._step("move_out", conn, self._move_out)
        if self._lead.may_plan:
            await self._repairing.attempt(conn)
        if self._lead.may_plan:
            await self._alerting.attempt(conn)

    async def _step(self, name: str, conn: AsyncConnection, work: Callable[[AsyncConnection], Awaitable[None]]) -> None:
        step = self._steps[name]
        if self._lead.may_plan and not step.is_resting:
            await step.attempt(conn, partial(work, conn))

    async def _for_each(
        self,
        name: str,
        conn: AsyncConnection,
        candidates: list[int],
        work: Callable[[AsyncConnection, int], Awaitable[None]],
    ) -> None:
        async def one(candidate: int) -> None:
            if self._lead.may_plan:
                await work(conn, candidate)

        await self._each[name].attempt(conn, candidates, one)

    def _complain(self, step: str, reason: str) -> None:
        if step == "reap":
            metrics.AGENT_LOST_LIST_ERROR.inc()
        if step in self._steps:
            self._steps[step].fail(reason)
        else:
            metrics.STEP_FAILURES.labels(step=step).inc()
            self._log.error("step_failed", step=step, error=reason)

    async def _promote(self, conn: AsyncConnection) -> None:
        self._promote_at = inf
        done = await promote(
            conn,
            shard=self._lead.shard,
            epoch=self._epoch,
            batch=self._settings.promote_batch,
            max_active_retries=self._settings.max_active_retries,
        )
        self._count_refused("run", done.refused, verb="promote")
        if done.promoted:
            self._waker.wake(Channel.READY)
        pause = SOON_SECONDS if done.promoted else LATER_SECONDS
        soonest = boot_seconds() + pause
        due_at = max(self._boot_time(done.next_due), soonest)
        self._promote_at = min(due_at, soonest if done.has_line else inf)

    async def _listen(self, conn: AsyncConnection) -> None:
        """The fallback when the leader's poll could not observe heartbeats."""
        now, before, self._listened_at = boot_seconds(), self._listened_at, 0.0
        heard = await observe_heartbeats(
            conn,
            shard=self._lead.shard,
            epoch=self._epoch,
            elapsed=now - before if before else 0.0,
            lost_after=self._settings.lost_after_seconds,
        )
        self._listened_at = now
        self._sessions = [*heard.silent, *heard.stranded]

    async def _reap(self, conn: AsyncConnection, session: int) -> None:
        settings = self._settings
        done = await reap_runner(
            conn,
            shard=self._lead.shard,
            epoch=self._epoch,
            session=session,
            lost_after=settings.lost_after_seconds,
            infra_retries=settings.infra_retries,
        )
        if done.reaped is None:
            return  # a heartbeat arrived meanwhile
        metrics.AGENT_LOST.inc(done.reaped)
        self._count_refused("run", done.refused, verb="reap")
        self._log.error("agent_lost", session=session, attempts=done.reaped)
        self._waker.wake(Channel.READY)

    async def _time_out(self, conn: AsyncConnection, run_id: int) -> None:
        asked = await time_out_run(conn, shard=self._lead.shard, epoch=self._epoch, run_id=run_id)
        if asked is None:
            return
        if asked < 0:
            self._count_refused("run", 1, verb="time_out")
            return
        metrics.TIMEOUTS.labels(kind="run").inc()
        self._log.warning("run_timeout", run=run_id, asked_to_stop=asked)
        if asked:
            self._waker.wake(Channel.STOP)

    async def _time_out_waits(self, conn: AsyncConnection) -> None:
        done = await time_out_waits(conn, shard=self._lead.shard, epoch=self._epoch, batch=self._settings.promote_batch)
        self._count_refused("run", done.refused, verb="time_out")
        if done.failed:
            metrics.TIMEOUTS.labels(kind="queue_wait").inc(done.failed)
            self._log.warning("queue_timeout", tasks=done.failed)
            self._waker.wake(Channel.READY)

    async def _hear(self, conn: AsyncConnection) -> None:
        done = await deliver_dependencies(
            conn, shard=self._lead.shard, epoch=self._epoch, batch=self._settings.promote_batch
        )
        self._has_arrivals = done.has_more
        if done.became_due:
            self._waker.wake(Channel.PLAN)

    async def _wake_tasks(self, conn: AsyncConnection) -> None:
        self._wake_at = inf
        done = await wake(conn, shard=self._lead.shard, epoch=self._epoch, batch=self._settings.promote_batch)
        self._count_refused("run", done.refused, verb="wake")
        if done.looked_at:
            self._waker.wake(Channel.READY)
        # The result of one wait may end the next. A wait that is due and was skipped is locked by another transaction.
        soonest = boot_seconds() + (0.0 if done.looked_at else LATER_SECONDS)
        self._wake_at = max(self._boot_time(done.next_wake), soonest)

    async def _admit(self, conn: AsyncConnection) -> None:
        done = await admit(conn, shard=self._lead.shard, epoch=self._epoch)
        self._count_refused("dag", done.refused, verb="admit")
        if done.admitted:
            self._waker.wake(Channel.READY)
            self._wake_at = boot_seconds()

    async def _move_on(self, conn: AsyncConnection, backfill_id: int) -> None:
        done = await advance(conn, shard=self._lead.shard, epoch=self._epoch, backfill_id=backfill_id)
        if done.made:
            metrics.BACKFILL_RUNS.inc(done.made)
            self._waker.wake(Channel.READY)
            self._wake_at = boot_seconds()
        # Soon again while there is progress; otherwise the leader's next poll reports whether there is work.
        if (done.moved or done.ended) and not done.is_over:
            self._backfill_at = boot_seconds() + SOON_SECONDS

    async def _tend_gates(self, conn: AsyncConnection) -> None:
        batch = self._settings.promote_batch
        done = await admit_gated_tasks(conn, shard=self._lead.shard, epoch=self._epoch, batch=batch)
        self._opens_at = max(self._boot_time(done.next_opening), boot_seconds() + SOON_SECONDS)
        if done.admitted:
            self._waker.wake(Channel.READY)

    async def _move_out(self, conn: AsyncConnection) -> None:
        """Move rows that belong to another shard since the number of shards changed. Other jobs run between two
        batches."""
        self._move_at = boot_seconds() + MOVES_SECONDS
        done = await rebalance_shard(conn, shard=self._lead.shard, epoch=self._epoch, batch=MOVES_AT_ONCE)
        if done.moved:
            metrics.MOVED.inc(done.moved)
            self._log.info("move_out", shard=self._lead.shard, moved=done.moved)
            self._waker.wake(Channel.PLAN)
            self._move_at = boot_seconds() + SOON_SECONDS
        elif done.is_over:
            self._move_at = inf
            if done.is_closed:
                self._on_closed()

    def _count_refused(self, kind: str, count: int, *, verb: str) -> None:
        if count:
            metrics.QUARANTINED.labels(kind=kind).inc(count)
            self._log.error("quarantine", kind=kind, count=count, verb=verb)

    @property
    def _epoch(self) -> int:
        if self._lead.epoch is None:
            raise NotLeader(f"shard {self._lead.shard} is led by another scheduler")
        return self._lead.epoch

    def _next_at(self) -> float:
        """When the next job is due, by the local clock."""
        is_called = self._has_room or self._has_arrivals or self._has_gates or self._listens
        if self._sessions or self._overdue or is_called:
            return 0.0
        resting = self._steps["promote"].rests_until
        soonest = min(max(self._promote_at, resting), self._expire_at, self._backfill_at, self._opens_at)
        soonest = min(soonest, max(self._move_at, self._steps["move_out"].rests_until))
        soonest = min(soonest, max(self._wake_at, self._steps["wake"].rests_until))
        return min(soonest, self._repairing.next_at, self._alerting.next_at)

    def _boot_time(self, instant: datetime | None) -> float:
        """Convert an instant of the database's clock to the local clock."""
        if instant is None or self._read_at is None:
            return inf
        read_at, at = self._read_at
        return at + (instant - read_at).total_seconds()
