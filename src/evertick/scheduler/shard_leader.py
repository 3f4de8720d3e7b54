"""The burst worker for many due schedules: while the database stores one batch, the next is read and planned.

The leader calls it when more is due than fits into a batch; it fires half of the schedules on its own connection.
Nothing depends on it: if it makes no progress, the leader fires all of them. A schedule that both take fires once, by
the cursor (V1).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from psycopg import AsyncConnection, errors

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries.shards import PendingWork
from evertick.domain.errors import NotLeader
from evertick.engine.fire_schedules import (
    Fired,
    PlannedFires,
    ScheduleHalf,
    fire_planned,
    fire_schedules,
    plan_next_fires,
)
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import CircuitBreaker, boot_seconds
from evertick.runtime.connections import Notifier
from evertick.runtime.loop import run_loop
from evertick.scheduler.leadership import LeaderConnection, Leadership
from evertick.scheduler.maintenance import Maintenance

# A batch takes a tenth of that. A worker that has not returned by then may hang, and the leader takes over its half.
LONGEST_BATCH_SECONDS = 0.5


LOCK_SHARE = 0.1


# When another transaction holds a needed lock, the leader knows which schedule to skip: this worker would wait for it
# repeatedly.
REST_SECONDS = 1.0


class BurstWorker:
    """`tell` is called with the result of each batch."""

    def __init__(
        self, settings: Settings, *, url: str, lead: Leadership, tell: Callable[[Fired], None], log: Log
    ) -> None:
        self._settings, self._lead, self._tell, self._log = settings, lead, tell, log
        self._link = LeaderConnection(url, lead, settings, lock_share=LOCK_SHARE)
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
        never = asyncio.Event()
        name = self._lead.loop_name("second_hand")
        pulse = LoopHealth(name, is_essential=False)
        await run_loop(self.tick, wake=self._wake, stop=never, name=name, log=self._log, pulse=pulse)

    async def tick(self) -> float:
        epoch = self._lead.current_epoch()
        if self._lead.epoch is None:
            await self._link.close()
        if not self._is_called or epoch is None or boot_seconds() < self._rests_until:
            return self._settings.tick_seconds
        self._is_called = False
        try:
            conn = await self._link.get()
            self._began_at = boot_seconds()
            done = await fire_schedules(
                conn, shard=self._lead.shard, epoch=epoch, batch=self._settings.fire_batch, half=ScheduleHalf.ODD
            )
        except NotLeader as error:
            self._log.warning("refused", error=error)
            return self._settings.tick_seconds
        finally:
            self._began_at = None
        self._tell(done)
        if done.passed_over:
            self._rests_until = boot_seconds() + REST_SECONDS
            return self._settings.tick_seconds
        if not (done.has_more and done.settled):
            return self._settings.tick_seconds
        self._is_called, self._began_at = True, boot_seconds()
        return 0.0

    async def close(self) -> None:
        await self._link.close()


# How soon to retry schedules that are due but locked by another transaction, and schedules whose lock wait timed out.
PAUSE_SECONDS, PASS_OVER_SECONDS = 0.1, 1.0


# The event loop's timers round up to whole milliseconds. So wait one less, and sleep for the rest.
TIMER_SECONDS = 0.001


# With less time than this until the next fire, its schedules are read when they are due. A plan that is this late is
# made again: it was made for the instant itself.
AHEAD_SECONDS, LATE_SECONDS = 0.005, 0.05


class ShardLeader:
    """It plans only while it leads. `may_take` returns whether to try to acquire leadership, and `hear` receives the
    result of each poll."""

    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        lead: Leadership,
        waker: Notifier,
        may_take: Callable[[int], bool],
        hear: Callable[[PendingWork | None, int], None],
        log: Log,
    ) -> None:
        self._settings, self._log = settings, log
        self._waker, self._may_take, self._hear = waker, may_take, hear
        self.lead, self.shard = lead, lead.shard
        self.wake = asyncio.Event()
        self._tending = Maintenance(
            settings,
            url=url,
            lead=self.lead,
            waker=waker,
            on_refused=self.wake.set,
            on_closed=self._close_shard,
            log=log,
        )
        self._second_hand = BurstWorker(settings, url=url, lead=self.lead, tell=self._tell_of_second, log=log)
        self._firing = CircuitBreaker("fire", log=log, longest_rest=settings.tick_seconds)
        self._planning = CircuitBreaker("plan_ahead", log=log)
        self._fire_at = 0.0
        self._ahead: PlannedFires | None = None
        self._fire_batch = settings.fire_batch
        self._has_half = False
        self._passed_over: dict[int, float] = {}
        self._heir: str | None = None
        self._is_closed = False

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; then the current tick finishes first."""
        name = self.lead.loop_name("scheduler")
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(each.run()) for each in (self._tending, self._second_hand)]
            await run_loop(self.tick, wake=self.wake, stop=stop, name=name, log=self._log)
            for task in beside:
                task.cancel()

    async def close(self) -> None:
        """Release leadership, and close every connection."""
        await self.lead.resign()
        await self._tending.close()
        await self._second_hand.close()

    def give_to(self, heir: str) -> None:
        """Transfer leadership to that scheduler, when the current tick is over."""
        self._heir = heir
        self.wake.set()

    def _close_shard(self) -> None:
        self._is_closed = True
        self.wake.set()

    async def tick(self) -> float:
        """Lead or stand by. Returns the seconds until the next known instant."""
        if self.lead.epoch is None and not self._may_take(self.shard):
            self._heir = None
            await self.lead.rest()
            return self._settings.tick_seconds
        timer = asyncio.get_running_loop().call_later(self._settings.leader_lease_seconds, self.lead.cut)
        try:
            return await self._tick(await self.lead.connection())
        except NotLeader as error:
            await self.lead.lose(error)
            return 0.0
        except BaseException:
            self.lead.forget_silence()
            raise
        finally:
            timer.cancel()

    async def _tick(self, conn: AsyncConnection) -> float:
        if self.lead.epoch is None:
            wait = await self.lead.stand_by(conn)
            self._hear(None, self.lead.of_shards)
            if self.lead.epoch is None:
                return wait
            self._fire_at, self._heir, self._is_closed = 0.0, None, False
            self._tending.begin()
        if self._is_closed or self._heir is not None:
            return await self._give_up()
        if self.lead.may_plan and self._sleep_off_the_rest() and not self._firing.is_resting:
            done = await self._firing.attempt(conn, lambda: self._fire(conn))
            if done is not None and done.has_more:
                self._second_hand.call()
                if not self.lead.is_renewal_due:
                    return 0.0
        seen = await self.lead.look(conn)
        self._fire_at = self._next_fire(seen)
        self._tending.hear(seen)
        self._hear(seen, self.lead.of_shards)
        await self._plan_ahead(conn, seen)
        return max(0.0, min(self._fire_at - TIMER_SECONDS - boot_seconds(), self.lead.tick_seconds))

    async def _give_up(self) -> float:
        heir, self._heir = self._heir, None
        if self._is_closed:
            self._is_closed = False
            await self.lead.lay_down()
        else:
            self._log.info("hand_over", shard=self.shard, heir=heir)
            await self.lead.resign(heir)
        return self._settings.tick_seconds

    def _sleep_off_the_rest(self) -> bool:
        """Returns whether it is time to fire; if that is less than a millisecond away, sleeps until then."""
        rest = self._fire_at - boot_seconds()
        if 0 < rest <= TIMER_SECONDS:
            time.sleep(rest)
        return rest <= TIMER_SECONDS

    async def _plan_ahead(self, conn: AsyncConnection, seen: PendingWork) -> None:
        """Read and plan the next fires while there is time: at their instant only the write is left to do."""
        due_at = seen.next_fire
        if self._ahead is not None and self._ahead.due_at == due_at:
            return
        self._ahead = None
        has_time = AHEAD_SECONDS <= self._fire_at - boot_seconds() <= self._settings.tick_seconds
        # A schedule that is already due and locked is planned for the time of its fire.
        if due_at is None or due_at <= seen.read_at or not has_time or self._planning.is_resting:
            return
        held, batch = self._passed_over, self._fire_batch
        self._ahead = await self._planning.attempt(
            conn, lambda: plan_next_fires(conn, shard=self.shard, due_at=due_at, batch=batch, passed_over=held)
        )

    async def _fire(self, conn: AsyncConnection) -> Fired:
        assert self.lead.epoch is not None
        now, ahead, self._ahead = boot_seconds(), self._ahead, None
        if ahead is not None and now - self._fire_at < LATE_SECONDS:
            done = await fire_planned(conn, ahead, shard=self.shard, epoch=self.lead.epoch, batch=self._fire_batch)
            done.lag_seconds = max(now - self._fire_at, 0.0)
        else:
            self._passed_over = {each: until for each, until in self._passed_over.items() if until > now}
            done = await self._fire_due(conn, self.lead.epoch)
        self._passed_over |= dict.fromkeys(done.lost, now + PAUSE_SECONDS)
        self._passed_over |= dict.fromkeys(done.passed_over, now + PASS_OVER_SECONDS)
        self._call_runners(done)
        # The notification is sent before anything is logged or queried.
        await asyncio.sleep(0)
        self._tell(done)
        return done

    async def _fire_due(self, conn: AsyncConnection, epoch: int) -> Fired:
        half = self._second_hand.half if self._has_half else None
        try:
            done = await fire_schedules(
                conn, shard=self.shard, epoch=epoch, batch=self._fire_batch, passed_over=self._passed_over, half=half
            )
        except errors.QueryCanceled:
            # This many take longer than the lease allows: fewer next time, at last one fire of one schedule.
            self._fire_batch = max(1, self._fire_batch // 4)
            raise
        self._fire_batch = min(self._fire_batch * 2, self._settings.fire_batch)
        # Both finish a half that is nearly done.
        self._has_half = done.has_more
        return done

    def _tell_of_second(self, done: Fired) -> None:
        self._call_runners(done)
        self._tell(done)

    def _call_runners(self, done: Fired) -> None:
        if done.settled:
            self._waker.wake(Channel.READY)
            if done.canceled:
                self._waker.wake(Channel.STOP)

    def _tell(self, done: Fired) -> None:
        for schedule_id in done.quarantined:
            metrics.QUARANTINED.labels(kind="schedule").inc()
            self._log.error("quarantine", schedule_id=schedule_id)
        for reason, count in done.skips.items():
            metrics.SKIPPED_FIRES.labels(reason=reason).inc(count)
        if done.settled:
            metrics.FIRES.inc(done.runs)
            metrics.SHARD_FIRES.labels(shard=str(self.shard)).inc(done.runs)
            metrics.FIRE_LAG.observe(done.lag_seconds)
            where = {"shard": self.shard} if self.lead.of_shards > 1 else {}
            self._log.info("fire", **where, schedules=done.settled, lag_ms=round(done.lag_seconds * 1000, 1))

    def _next_fire(self, seen: PendingWork) -> float:
        """By the database's clock: a wrong clock on this machine has no effect."""
        now = boot_seconds()
        if any(trouble.startswith("fire:") for trouble in seen.troubles):
            return now + PAUSE_SECONDS
        if seen.next_fire is None:
            return float("inf")
        at = now + (seen.next_fire - seen.read_at).total_seconds()
        is_held = at <= now and (self._passed_over or self._firing.is_resting)
        return now + PAUSE_SECONDS if is_held else at
