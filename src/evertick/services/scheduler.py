"""The scheduler: leads its shard, fires what is due, and has everything else tended beside.

Sleeps until the next due instant, a wake-up or the tick; an idle leader asks the database once per tick. Never runs user
code, and nothing but a fire is on the way of a fire.
"""

from __future__ import annotations

import asyncio

from psycopg import AsyncConnection, errors

from evertick.config import Settings
from evertick.domain.errors import NotLeader
from evertick.engine.fire import Fired, fire
from evertick.services import metrics
from evertick.services.contained import Step, boot_seconds
from evertick.services.events import Log
from evertick.services.lead import SHARD, Lead
from evertick.services.link import Link, Waker, keep_listening
from evertick.services.loop import run_loop
from evertick.services.neighbours import Neighbours
from evertick.services.second_hand import SecondHand
from evertick.services.tending import Tending
from evertick.services.upkeep import Upkeep
from evertick.store.db import Purpose
from evertick.store.shards import Seen
from evertick.store.wake import Channel

# What is due but in somebody's hands is not asked for again and again; still less what we have waited for in vain.
PAUSE_SECONDS, PASS_OVER_SECONDS = 0.1, 1.0


class Scheduler:
    """One replica. It plans only while it leads; standing by costs one statement per tick."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log) -> None:
        self._settings, self._url, self._log = settings, url, log
        self._waker = Waker(url, is_enabled=settings.notify, log=log)
        self._beside = Link(url, Purpose.PLANNING)
        self._neighbours = Neighbours(settings, link=self._beside, on_buried=self._on_buried, log=log)
        self._lead = Lead(settings, url=url, owner=owner, log=log)
        self.wake = asyncio.Event()
        self.stop = asyncio.Event()
        self._tending = Tending(
            settings, url=url, lead=self._lead, waker=self._waker, on_refused=self.wake.set, log=log
        )
        self._second_hand = SecondHand(settings, url=url, lead=self._lead, tell=self._tell, log=log)
        self._upkeep = Upkeep(settings, url=url, epoch=self._lead.current_epoch, log=log)
        self._firing = Step("fire", log=log, longest_rest=settings.tick_seconds)
        self._fire_at = 0.0
        self._fire_batch = settings.fire_batch
        self._has_half = False
        self._passed_over: dict[int, float] = {}

    async def run(self) -> None:
        """Until `stop` is set; then the shard is handed over at once."""
        async with asyncio.TaskGroup() as group:
            beside = (self._waker, self._neighbours, self._tending, self._second_hand, self._upkeep)
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
        if self._lead.may_plan and boot_seconds() >= self._fire_at and not self._firing.is_resting:
            done = await self._firing.attempt(conn, lambda: self._fire(conn))
            if done is not None and done.has_more:
                self._second_hand.call()
                if not self._lead.is_renewal_due:
                    return 0.0
        seen = await self._lead.look(conn)
        self._fire_at = self._next_fire(seen)
        self._tending.hear(seen)
        return max(0.0, min(self._fire_at - boot_seconds(), self._settings.tick_seconds))

    async def _fire(self, conn: AsyncConnection) -> Fired:
        assert self._lead.epoch is not None
        now = boot_seconds()
        self._passed_over = {each: until for each, until in self._passed_over.items() if until > now}
        half = self._second_hand.half if self._has_half else None
        try:
            done = await fire(
                conn,
                shard=SHARD,
                epoch=self._lead.epoch,
                batch=self._fire_batch,
                passed_over=self._passed_over,
                half=half,
            )
        except errors.QueryCanceled:
            # So many at once take longer than the lease allows: fewer next time, in the end one fire of one schedule.
            self._fire_batch = max(1, self._fire_batch // 4)
            raise
        self._fire_batch = min(self._fire_batch * 2, self._settings.fire_batch)
        # A half that is nearly done is finished by both.
        self._has_half = done.has_more
        self._passed_over |= dict.fromkeys(done.lost, now + PAUSE_SECONDS)
        self._passed_over |= dict.fromkeys(done.passed_over, now + PASS_OVER_SECONDS)
        self._tell(done)
        return done

    def _tell(self, done: Fired) -> None:
        for schedule_id in done.quarantined:
            metrics.QUARANTINED.labels(kind="schedule").inc()
            self._log.error("quarantine", schedule_id=schedule_id)
        for reason, count in done.skips.items():
            metrics.SKIPPED_FIRES.labels(reason=reason).inc(count)
        if done.settled:
            metrics.FIRES.inc(done.runs)
            metrics.FIRE_LAG.observe(done.lag_seconds)
            self._waker.wake(Channel.READY)
            if done.canceled:
                self._waker.wake(Channel.STOP)
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
