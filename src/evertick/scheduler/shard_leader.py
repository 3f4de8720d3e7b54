"""The leader of one shard in this scheduler: fires due schedules, and runs maintenance concurrently.

Sleeps until the next due instant, a notification or the tick; an idle leader queries the database once per tick. Never
runs user code, and does nothing between a due instant and its fire. Shards share only the process: one that hangs
delays no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from psycopg import AsyncConnection, errors

from evertick.db.notify import Channel
from evertick.domain.errors import NotLeader
from evertick.engine.fire_schedules import (
    Fired,
    PlannedFires,
    ScheduleHalf,
    fire_planned,
    fire_schedules,
    plan_next_fires,
)
from evertick.engine.shards import PendingWork
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runtime.circuit_breaker import CircuitBreaker
from evertick.runtime.connections import Notifier
from evertick.runtime.loop import in_background, run_loop
from evertick.scheduler.leadership import LeaderConnection, Leadership
from evertick.scheduler.maintenance import Maintenance

# How soon to retry schedules that are due but locked by another transaction, and schedules whose lock wait timed out.
PAUSE_SECONDS, PASS_OVER_SECONDS = 0.1, 1.0
# The event loop's timers round up to whole milliseconds. So wait one less, and sleep for the rest.
TIMER_SECONDS = 0.001
# With less time than this until the next fire, its schedules are read when they are due. A plan that is this late is
# made again: it was made for the instant itself.
PLAN_SECONDS, LATE_SECONDS = 0.005, 0.05

# A batch takes a tenth of that. A worker that has not returned by then may hang, and the leader takes over its half.
LONGEST_BATCH_SECONDS = 0.5
BURST_LOCK_SHARE = 0.1
# When another transaction holds a needed lock, the leader knows which schedule to skip: this worker would wait for it
# repeatedly.
BURST_REST_SECONDS = 1.0


def channels_after(done: Fired) -> list[Channel]:
    """The channels of the processes that can act on what was fired."""
    if not done.settled:
        return []
    return [Channel.TASKS, Channel.STOP] if done.canceled else [Channel.TASKS]


class ShardLeader:
    """It plans only while it leads. `may_acquire` returns whether to try to acquire leadership of a shard, and `publish`
    receives the result of each poll, with the number of shards."""

    def __init__(
        self,
        leadership: Leadership,
        *,
        notifier: Notifier,
        may_acquire: Callable[[int], bool],
        publish: Callable[[PendingWork | None, int], None],
        log: Log,
    ) -> None:
        self._settings, self._log = leadership.settings, log
        self._notifier, self._may_acquire, self._publish = notifier, may_acquire, publish
        self.leadership, self.shard = leadership, leadership.shard
        self.wake = asyncio.Event()
        self._maintenance = Maintenance(leadership, notifier=notifier, wake_leader=self.wake, log=log)
        self._burst_worker = BurstWorker(leadership, report=self._report_burst, log=log)
        self._firing = CircuitBreaker("fire", log=log, longest_rest=self._settings.tick_seconds)
        self._planning = CircuitBreaker("plan_ahead", log=log)
        self._fire_at = 0.0
        self._planned: PlannedFires | None = None
        self._fire_batch = self._settings.fire_batch
        self._has_half = False
        self._skipped_until: dict[int, float] = {}
        self._successor: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; then the current tick finishes first."""
        name = self.leadership.loop_name("scheduler")
        async with in_background(self._maintenance.run(), self._burst_worker.run()):
            await run_loop(self.tick, wake=self.wake, stop=stop, name=name, log=self._log)

    async def close(self) -> None:
        """Release leadership, and close every connection."""
        await self.leadership.release()
        await self._maintenance.close()
        await self._burst_worker.close()

    def transfer_to(self, successor: str) -> None:
        """Transfer leadership to that scheduler, when the current tick is over."""
        self._successor = successor
        self.wake.set()

    async def tick(self) -> float:
        """Lead or stand by. Returns the seconds until the next known instant."""
        if self.leadership.epoch is None and not self._may_acquire(self.shard):
            self._successor = None
            await self.leadership.standby()
            return self._settings.tick_seconds
        timer = asyncio.get_running_loop().call_later(self._settings.leader_lease_seconds, self.leadership.abort)
        try:
            return await self._tick(await self.leadership.connection())
        except NotLeader as error:
            await self.leadership.on_lost(error)
            return 0.0
        except BaseException:
            self.leadership.forget_observation()
            raise
        finally:
            timer.cancel()

    async def _tick(self, conn: AsyncConnection) -> float:
        if self.leadership.epoch is None:
            wait = await self.leadership.try_acquire(conn)
            self._publish(None, self.leadership.shard_count)
            if self.leadership.epoch is None:
                return wait
            self._fire_at, self._successor = 0.0, None
            self._maintenance.begin()
        if self._maintenance.is_shard_closed or self._successor is not None:
            return await self._give_away()
        if self.leadership.may_plan and self._wait_for_fire() and not self._firing.is_open:
            done = await self._firing.attempt(conn, lambda: self._fire(conn))
            if done is not None and done.has_more:
                self._burst_worker.call()
                if not self.leadership.is_renewal_due:
                    return 0.0
        work = await self.leadership.poll_work(conn)
        self._fire_at = self._next_fire(work)
        self._maintenance.plan(work)
        self._publish(work, self.leadership.shard_count)
        await self._plan_next(conn, work)
        return max(0.0, min(self._fire_at - TIMER_SECONDS - boot_seconds(), self.leadership.tick_seconds))

    async def _give_away(self) -> float:
        successor, self._successor = self._successor, None
        if self._maintenance.is_shard_closed:
            await self.leadership.close()
        else:
            self._log.info("leadership_transferred", shard=self.shard, successor=successor)
            await self.leadership.release(successor)
        return self._settings.tick_seconds

    def _wait_for_fire(self) -> bool:
        """Returns whether it is time to fire; if that is less than a millisecond away, sleeps until then."""
        rest = self._fire_at - boot_seconds()
        if 0 < rest <= TIMER_SECONDS:
            time.sleep(rest)
        return rest <= TIMER_SECONDS

    async def _plan_next(self, conn: AsyncConnection, work: PendingWork) -> None:
        """Read and plan the next fires while there is time: at their instant only the write is left to do."""
        due_at = work.next_fire
        if self._planned is not None and self._planned.due_at == due_at:
            return
        self._planned = None
        has_time = PLAN_SECONDS <= self._fire_at - boot_seconds() <= self._settings.tick_seconds
        # A schedule that is already due and locked is planned for the time of its fire.
        if due_at is None or due_at <= work.read_at or not has_time or self._planning.is_open:
            return
        held, batch = self._skipped_until, self._fire_batch
        self._planned = await self._planning.attempt(
            conn, lambda: plan_next_fires(conn, shard=self.shard, due_at=due_at, batch=batch, passed_over=held)
        )

    async def _fire(self, conn: AsyncConnection) -> Fired:
        now, planned, self._planned = boot_seconds(), self._planned, None
        if planned is not None and now - self._fire_at < LATE_SECONDS:
            done = await fire_planned(conn, planned, **self.leadership.key, batch=self._fire_batch)
            done.lag_seconds = max(now - self._fire_at, 0.0)
        else:
            self._skipped_until = {each: until for each, until in self._skipped_until.items() if until > now}
            done = await self._fire_due(conn)
        self._skipped_until |= dict.fromkeys(done.lost, now + PAUSE_SECONDS)
        self._skipped_until |= dict.fromkeys(done.passed_over, now + PASS_OVER_SECONDS)
        for channel in channels_after(done):
            self._notifier.wake(channel)
        # The notification is sent before anything is logged or queried.
        await asyncio.sleep(0)
        self._report(done)
        return done

    async def _fire_due(self, conn: AsyncConnection) -> Fired:
        half, held, key = self._burst_worker.half if self._has_half else None, self._skipped_until, self.leadership.key
        try:
            done = await fire_schedules(conn, **key, batch=self._fire_batch, passed_over=held, half=half)
        except errors.QueryCanceled:
            # This many take longer than the lease allows: fewer next time, at last one fire of one schedule.
            self._fire_batch = max(1, self._fire_batch // 4)
            raise
        self._fire_batch = min(self._fire_batch * 2, self._settings.fire_batch)
        # Both finish a half that is nearly done.
        self._has_half = done.has_more
        return done

    def _report_burst(self, done: Fired) -> None:
        for channel in channels_after(done):
            self._notifier.wake(channel)
        self._report(done)

    def _report(self, done: Fired) -> None:
        for schedule_id in done.quarantined:
            metrics.QUARANTINED.labels(kind="schedule").inc()
            self._log.error("row_quarantined", schedule_id=schedule_id)
        for reason, count in done.skips.items():
            metrics.SKIPPED_FIRES.labels(reason=reason).inc(count)
        if done.settled:
            metrics.FIRES.inc(done.runs)
            metrics.SHARD_FIRES.labels(shard=str(self.shard)).inc(done.runs)
            metrics.FIRE_LAG.observe(done.lag_seconds)
            where = {"shard": self.shard} if self.leadership.shard_count > 1 else {}
            self._log.info("schedules_fired", **where, schedules=done.settled, lag_ms=round(done.lag_seconds * 1000, 1))

    def _next_fire(self, work: PendingWork) -> float:
        """By the database's clock: a wrong clock on this machine has no effect."""
        now = boot_seconds()
        if any(error.startswith("fire:") for error in work.errors):
            return now + PAUSE_SECONDS
        if work.next_fire is None:
            return float("inf")
        at = now + (work.next_fire - work.read_at).total_seconds()
        is_held = at <= now and (self._skipped_until or self._firing.is_open)
        return now + PAUSE_SECONDS if is_held else at


class BurstWorker:
    """The worker for many due schedules: while the database stores one batch, the next is read and planned.

    The leader calls it when more is due than fits into a batch; it fires half of the schedules on its own connection.
    Nothing depends on it: if it makes no progress, the leader fires all of them. A schedule that both take fires once,
    by the cursor (V1). `report` receives the result of each batch.
    """

    def __init__(self, leadership: Leadership, *, report: Callable[[Fired], None], log: Log) -> None:
        self._leadership, self._settings, self._report, self._log = leadership, leadership.settings, report, log
        self._link = LeaderConnection(leadership, lock_share=BURST_LOCK_SHARE)
        self._wake = asyncio.Event()
        self._is_called = False
        self._began_at: float | None = None
        self._rests_until = 0.0

    @property
    def half(self) -> ScheduleHalf | None:
        """The leader's part: half of the schedules while this worker makes progress with the others, otherwise all."""
        is_busy = self._began_at is not None and boot_seconds() - self._began_at < LONGEST_BATCH_SECONDS
        return ScheduleHalf.EVEN if is_busy else None

    def call(self) -> None:
        """More is due than fits into one batch."""
        self._is_called = True
        self._wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        name = self._leadership.loop_name("second_hand")
        pulse = LoopHealth(name, is_essential=False)
        await run_loop(self.tick, wake=self._wake, name=name, log=self._log, pulse=pulse)

    async def tick(self) -> float:
        if self._leadership.epoch is None:
            await self._link.close()
        if not self._is_called or not self._leadership.may_plan or boot_seconds() < self._rests_until:
            return self._settings.tick_seconds
        self._is_called = False
        try:
            conn = await self._link.get()
            self._began_at = boot_seconds()
            batch, key = self._settings.fire_batch, self._leadership.key
            done = await fire_schedules(conn, **key, batch=batch, half=ScheduleHalf.ODD)
        except NotLeader as error:
            self._log.warning("leadership_lost", error=error)
            return self._settings.tick_seconds
        finally:
            self._began_at = None
        self._report(done)
        if done.passed_over:
            self._rests_until = boot_seconds() + BURST_REST_SECONDS
        if done.passed_over or not (done.has_more and done.settled):
            return self._settings.tick_seconds
        self._is_called, self._began_at = True, boot_seconds()
        return 0.0

    async def close(self) -> None:
        await self._link.close()
