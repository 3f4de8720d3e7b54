"""The scheduler: leads its shard, fires what is due, promotes what time has freed, repairs, and buries the lost.

Sleeps until the next due instant, a wake-up or the tick. Each step fails on its own (A12). Never runs user code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.engine.fire import fire
from evertick.engine.promote import promote
from evertick.engine.reap import bury_silent
from evertick.engine.reconcile import reconcile
from evertick.services.events import Log
from evertick.services.link import Link, Waker, keep_listening
from evertick.services.loop import run_loop
from evertick.store import schedules, shards
from evertick.store.db import Purpose
from evertick.store.wake import Channel

SHARD = 0


class Scheduler:
    """One replica. It plans only while it leads; standing by costs one statement per tick."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log) -> None:
        self._settings, self._url, self._owner, self._log = settings, url, owner, log
        self._link = Link(url, Purpose.PLANNING)
        self._waker = Waker(url, is_enabled=settings.notify)
        self._epoch: int | None = None
        self._renewed_at = 0.0
        self._swept_at = 0.0
        self._reconciled_up_to = (0, 0)
        self.wake = asyncio.Event()
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Until `stop` is set; then the shard is handed over at once."""
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(self._waker.run())]
            if self._settings.notify:
                listening = keep_listening(self._url, [Channel.PLAN], lambda _: self.wake.set(), log=self._log)
                background.append(group.create_task(listening))
            await run_loop(self.tick, wake=self.wake, stop=self.stop, name="scheduler", log=self._log)
            for task in background:
                task.cancel()
        await self._resign()

    async def tick(self) -> float:
        """One pass over everything that is due. Returns the seconds until the next instant that is known."""
        conn = await self._link.get()
        try:
            if not await self._leads(conn):
                return self._settings.tick_seconds
            return await self._plan(conn)
        except NotLeader as error:
            self._epoch = None
            self._log.warning("deposed", error=error)
            return 0.0
        except BaseException:
            # Whatever silence there was meanwhile, nobody watched it (V8): counting starts anew.
            self._swept_at = 0.0
            raise

    async def _leads(self, conn: AsyncConnection) -> bool:
        """Whether this replica leads, renewing or taking the lease as needed."""
        seconds = self._settings.leader_lease_seconds
        started = time.monotonic()
        if self._epoch is not None:
            if started - self._renewed_at < self._settings.tick_seconds:
                return True
            if await shards.renew(conn, shard=SHARD, epoch=self._epoch, seconds=seconds):
                self._renewed_at = started
                return True
            self._log.warning("deposed", epoch=self._epoch)
            self._epoch = None
        self._epoch = await shards.take(conn, shard=SHARD, owner=self._owner, seconds=seconds)
        if self._epoch is None:
            return False
        self._renewed_at, self._swept_at = started, 0.0
        self._log.info("lead", shard=SHARD, epoch=self._epoch)
        return True

    async def _plan(self, conn: AsyncConnection) -> float:
        await self._step("fire", lambda: self._fire(conn))
        due_by_time = await self._step("promote", lambda: self._promote(conn))
        elapsed = time.monotonic() - self._swept_at
        if elapsed >= self._settings.tick_seconds:
            await self._step("reap", lambda: self._reap(conn, 0.0 if self._swept_at == 0.0 else elapsed))
            await self._step("reconcile", lambda: self._reconcile(conn))
            self._swept_at = time.monotonic()
        return await self._seconds_to_next(conn, due_by_time)

    async def _step(self, name: str, work: Callable[[], Awaitable[datetime | None]]) -> datetime | None:
        """One step, contained: what breaks here is told and must not stop the others."""
        try:
            return await work()
        except (NotLeader, psycopg.OperationalError, psycopg.InterfaceError, PostgresUnavailable):
            raise
        except Exception as error:
            self._log.error("step_failed", step=name, error=error)
            return None

    async def _fire(self, conn: AsyncConnection) -> None:
        assert self._epoch is not None
        while True:
            done = await fire(conn, shard=SHARD, epoch=self._epoch, batch=self._settings.fire_batch)
            for schedule_id in done.quarantined:
                self._log.error("quarantine", schedule_id=schedule_id)
            if done.settled:
                self._waker.wake(Channel.READY)
                self._log.info("fire", schedules=done.settled, lag_ms=round(done.lag_seconds * 1000, 1))
            if done.was_due < self._settings.fire_batch:
                return

    async def _promote(self, conn: AsyncConnection) -> datetime | None:
        assert self._epoch is not None
        while True:
            done = await promote(conn, shard=SHARD, epoch=self._epoch, batch=self._settings.promote_batch)
            if done.promoted:
                self._waker.wake(Channel.READY)
            if done.promoted < self._settings.promote_batch:
                return done.next_due

    async def _reap(self, conn: AsyncConnection, elapsed: float) -> None:
        settings = self._settings
        lost = await bury_silent(
            conn, elapsed=elapsed, lost_after=settings.lost_after_seconds, infra_retries=settings.infra_retries
        )
        for session in lost:
            self._log.error("agent_lost", session=session, silent_seconds=settings.lost_after_seconds)
            self._waker.wake(Channel.READY)

    async def _reconcile(self, conn: AsyncConnection) -> None:
        assert self._epoch is not None
        done = await reconcile(
            conn,
            shard=SHARD,
            epoch=self._epoch,
            after=self._reconciled_up_to,
            batch=self._settings.reconcile_batch,
        )
        self._reconciled_up_to = done.last
        if done.repaired:
            self._log.warning("reconcile", repaired=sorted(set(done.repaired)), count=len(done.repaired))
            self._waker.wake(Channel.READY)

    async def _seconds_to_next(self, conn: AsyncConnection, due_by_time: datetime | None) -> float:
        """By the database's clock: a wrong clock on this machine changes nothing."""
        next_fire, now = await schedules.next_due(conn, shard=SHARD)
        known = [instant for instant in (next_fire, due_by_time) if instant is not None]
        seconds = min(((instant - now).total_seconds() for instant in known), default=self._settings.tick_seconds)
        return max(0.0, min(seconds, self._settings.tick_seconds))

    async def _resign(self) -> None:
        with suppress(psycopg.Error, PostgresUnavailable, OSError):
            if self._epoch is not None:
                await shards.resign(await self._link.get(), shard=SHARD, epoch=self._epoch)
        await self._waker.close()
        await self._link.close()
