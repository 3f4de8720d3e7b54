"""The scheduler: leads its shard, fires what is due, and has everything else tended beside.

Sleeps until the next due instant, a wake-up or the tick; an idle leader asks the database once per tick. Never runs user
code, and nothing but a fire is on the way of a fire.
"""

from __future__ import annotations

import asyncio
import time

from psycopg import AsyncConnection, errors

from evertick.config import Settings
from evertick.domain.errors import NotLeader
from evertick.engine.fire import Ahead, Fired, fire, fire_ahead, plan_ahead
from evertick.services import metrics
from evertick.services.contained import Step, boot_seconds
from evertick.services.events import Log
from evertick.services.lead import SHARD, Lead
from evertick.services.link import Link, Waker, keep_listening
from evertick.services.loop import run_loop
from evertick.services.neighbours import Neighbours
from evertick.services.notifying import Notifying
from evertick.services.second_hand import SecondHand
from evertick.services.tending import Tending
from evertick.services.upkeep import Upkeep
from evertick.store.db import Purpose
from evertick.store.shards import Seen
from evertick.store.wake import Channel

# What is due but in somebody's hands is not asked for again and again; still less what we have waited for in vain.
PAUSE_SECONDS, PASS_OVER_SECONDS = 0.1, 1.0
# The event loop's timers go by whole milliseconds, rounded up. So it is asked for one less, and the rest is slept off.
TIMER_SECONDS = 0.001
# With less time than that until the next fire, what it does is read when it is due. And what is this late is read anew: the
# plan was made for the instant itself.
AHEAD_SECONDS, LATE_SECONDS = 0.005, 0.05


class Scheduler:
    """One replica. It plans only while it leads; standing by costs one statement per tick."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log) -> None:
        self._settings, self._url, self._log = settings, url, log
        self._waker = Waker(url, is_enabled=settings.notify, log=log, has_marked=lambda: self._lead.has_marked)
        self._beside = Link(url, Purpose.PLANNING)
        self._neighbours = Neighbours(settings, link=self._beside, on_buried=self._on_buried, log=log)
        self._lead = Lead(settings, url=url, owner=owner, log=log)
        self.wake = asyncio.Event()
        self.stop = asyncio.Event()
        self._tending = Tending(
            settings, url=url, lead=self._lead, waker=self._waker, on_refused=self.wake.set, log=log
        )
        self._second_hand = SecondHand(settings, url=url, lead=self._lead, tell=self._tell_of_second, log=log)
        self._notifying = Notifying(settings, url=url, lead=self._lead, waker=self._waker, log=log)
        self._upkeep = Upkeep(settings, url=url, epoch=self._lead.current_epoch, log=log)
        self._firing = Step("fire", log=log, longest_rest=settings.tick_seconds)
        self._planning = Step("plan_ahead", log=log)
        self._fire_at = 0.0
        self._ahead: Ahead | None = None
        self._fire_batch = settings.fire_batch
        self._has_half = False
        self._passed_over: dict[int, float] = {}

    async def run(self) -> None:
        """Until `stop` is set; then the shard is handed over at once."""
        async with asyncio.TaskGroup() as group:
            beside = (self._waker, self._neighbours, self._tending, self._second_hand, self._upkeep, self._notifying)
            background = [group.create_task(each.run()) for each in beside]
            if self._settings.notify:
                listening = keep_listening(self._url, [Channel.PLAN, Channel.JOIN], self._on_wake, log=self._log)
                background.append(group.create_task(listening))
            await run_loop(self.tick, wake=self.wake, stop=self.stop, name="scheduler", log=self._log)
            for task in background:
                task.cancel()
        await self.close()

    async def close(self) -> None:
        """Hand over what is led, and leave no connection open."""
        await self._lead.resign()
        await self._tending.close()
        await self._second_hand.close()
        await self._notifying.close()
        await self._waker.close()
        await self._beside.close()

    def _on_wake(self, channel: Channel) -> None:
        if channel is Channel.JOIN:
            self._neighbours.ask()
        else:
            self.wake.set()

    def _on_buried(self) -> None:
        self._waker.wake(Channel.READY)

    async def tick(self) -> float:
        """Lead or stand by. Returns the seconds until the next instant that is known."""
        timer = asyncio.get_running_loop().call_later(self._settings.leader_lease_seconds, self._lead.cut)
        try:
            return await self._tick(await self._lead.connection())
        except NotLeader as error:
            await self._lead.lose(error)
            return 0.0
        except BaseException:
            self._lead.forget_silence()
            raise
        finally:
            timer.cancel()

    async def _tick(self, conn: AsyncConnection) -> float:
        if self._lead.epoch is None:
            wait = await self._lead.stand_by(conn)
            if self._lead.epoch is None:
                return wait
            self._fire_at = 0.0
            self._tending.begin()
        if self._lead.may_plan and self._sleep_off_the_rest() and not self._firing.is_resting:
            done = await self._firing.attempt(conn, lambda: self._fire(conn))
            if done is not None and done.has_more:
                self._second_hand.call()
                if not self._lead.is_renewal_due:
                    return 0.0
        seen = await self._lead.look(conn)
        self._fire_at = self._next_fire(seen)
        self._tending.hear(seen)
        self._notifying.hear(seen)
        await self._plan_ahead(conn, seen)
        return max(0.0, min(self._fire_at - TIMER_SECONDS - boot_seconds(), self._settings.tick_seconds))

    def _sleep_off_the_rest(self) -> bool:
        """Whether it is time to fire; if that is less than a millisecond away, it is afterwards."""
        rest = self._fire_at - boot_seconds()
        if 0 < rest <= TIMER_SECONDS:
            time.sleep(rest)
        return rest <= TIMER_SECONDS

    async def _plan_ahead(self, conn: AsyncConnection, seen: Seen) -> None:
        """Read and plan what fires next while there is time: at its instant nothing is left to do but to store it."""
        due_at = seen.next_fire
        if self._ahead is not None and self._ahead.due_at == due_at:
            return
        self._ahead = None
        has_time = AHEAD_SECONDS <= self._fire_at - boot_seconds() <= self._settings.tick_seconds
        # What is due already and waits for somebody is planned by the time that it is then.
        if due_at is None or due_at <= seen.read_at or not has_time or self._planning.is_resting:
            return
        held, batch = self._passed_over, self._fire_batch
        self._ahead = await self._planning.attempt(
            conn, lambda: plan_ahead(conn, shard=SHARD, due_at=due_at, batch=batch, passed_over=held)
        )

    async def _fire(self, conn: AsyncConnection) -> Fired:
        assert self._lead.epoch is not None
        now, ahead, self._ahead = boot_seconds(), self._ahead, None
        if ahead is not None and now - self._fire_at < LATE_SECONDS:
            done = await fire_ahead(conn, ahead, shard=SHARD, epoch=self._lead.epoch, batch=self._fire_batch)
            done.lag_seconds = max(now - self._fire_at, 0.0)
        else:
            self._passed_over = {each: until for each, until in self._passed_over.items() if until > now}
            done = await self._fire_due(conn, self._lead.epoch)
        self._passed_over |= dict.fromkeys(done.lost, now + PAUSE_SECONDS)
        self._passed_over |= dict.fromkeys(done.passed_over, now + PASS_OVER_SECONDS)
        self._call_runners(done)
        # The wake-up goes out before anything is written down or asked.
        await asyncio.sleep(0)
        self._tell(done)
        return done

    async def _fire_due(self, conn: AsyncConnection, epoch: int) -> Fired:
        half = self._second_hand.half if self._has_half else None
        try:
            done = await fire(
                conn, shard=SHARD, epoch=epoch, batch=self._fire_batch, passed_over=self._passed_over, half=half
            )
        except errors.QueryCanceled:
            # So many at once take longer than the lease allows: fewer next time, in the end one fire of one schedule.
            self._fire_batch = max(1, self._fire_batch // 4)
            raise
        self._fire_batch = min(self._fire_batch * 2, self._settings.fire_batch)
        # A half that is nearly done is finished by both.
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
            metrics.FIRE_LAG.observe(done.lag_seconds)
            self._log.info("fire", schedules=done.settled, lag_ms=round(done.lag_seconds * 1000, 1))

    def _next_fire(self, seen: Seen) -> float:
        """By the database's clock: a wrong clock on this machine changes nothing."""
        now = boot_seconds()
        if any(trouble.startswith("fire:") for trouble in seen.troubles):
            return now + PAUSE_SECONDS
        if seen.next_fire is None:
            return float("inf")
        at = now + (seen.next_fire - seen.read_at).total_seconds()
        is_held = at <= now and (self._passed_over or self._firing.is_resting)
        return now + PAUSE_SECONDS if is_held else at
