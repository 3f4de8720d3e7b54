"""Leadership of one shard from this scheduler's point of view: acquired, renewed, lost and released.

The database decides which scheduler leads. The local state only avoids requests that would be refused: a leader never
plans past the end of its lease by its own clock, counted from when the last acknowledged renewal was sent.
"""

from __future__ import annotations

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.connection import has_own_session
from evertick.db.failover import guard_of
from evertick.db.notify import Channel, notify
from evertick.db.queries import schedules, shards
from evertick.db.queries.shards import PendingWork
from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.domain.failover import Server, WalMark
from evertick.engine.verbs import as_leader
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runtime.circuit_breaker import CircuitBreaker, boot_seconds
from evertick.runtime.connections import ReconnectingConnection

# Shares of the lease: how much of it is used for sending statements, the statement timeout, and the lock timeout.
GOOD_SHARE, STATEMENT_SHARE, LOCK_SHARE = 0.9, 0.5, 0.05
# Share of a tick: how soon a leader without the session lock asks for it again. A frozen predecessor keeps the lock
# until the server ends its session, which is about when its lease expires.
UNWATCHED_SHARE = 0.2
# How long a failover mark counts as fresh. With the default tick the next one comes earlier.
MARK_SECONDS = 1.5


class Leadership:
    """`epoch` is None while another scheduler leads. Its connection holds the session lock, if possible."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log, shard: int = 0) -> None:
        self._settings, self._owner, self._log, self.shard = settings, owner, log, shard
        self._link, self._guard = ReconnectingConnection(url, Purpose.SCHEDULER), guard_of(url)
        self._bounded: AsyncConnection | None = None
        self._watched: AsyncConnection | None = None
        self._could_be_watched = False
        self._renewed_at = self._observed_at = self._marked_at = 0.0
        self._polling = CircuitBreaker("look", log=log)
        self.epoch: int | None = None
        self.server: Server | None = None
        # The number of shards that are led by any scheduler, as far as known.
        self.of_shards = 1

    async def connection(self) -> AsyncConnection:
        """The leader's connection, with timeouts that fit the lease."""
        conn = await self._link.get()
        if self.epoch is not None and self._link.server != self.server:
            # A standby took over and may have lost this leadership: there, another scheduler can have the same epoch.
            await self.on_lost(
                NotLeader(f"epoch {self.epoch} of shard {self.shard} belongs to another server ({self.server})")
            )
            conn = await self._link.get()
        if conn is not self._bounded:
            lease = self._settings.leader_lease_seconds
            if has_own_session(conn):
                await shards.bound_session(
                    conn,
                    statement_seconds=lease * STATEMENT_SHARE,
                    lock_seconds=lease * LOCK_SHARE,
                    transaction_seconds=lease,
                    idle_seconds=lease,
                )
            self._bounded = conn
        return conn

    def abort(self) -> None:
        """Stop waiting for an answer that does not come."""
        self._link.abort()

    @property
    def may_plan(self) -> bool:
        lasts = self._settings.leader_lease_seconds * GOOD_SHARE
        return self.epoch is not None and boot_seconds() < self._renewed_at + lasts

    def loop_name(self, name: str) -> str:
        """The name of a loop that exists once per shard. Most installations have one shard, whose loops have plain
        names."""
        return name if self.shard == 0 else f"{name}_{self.shard}"

    def current_epoch(self) -> int | None:
        """The epoch with which this scheduler may plan now; None if it may not."""
        return self.epoch if self.may_plan else None

    @property
    def tick_seconds(self) -> float:
        """Seconds until the next renewal."""
        tick = self._settings.tick_seconds
        return tick * UNWATCHED_SHARE if self._watched is None and self._could_be_watched else tick

    @property
    def is_renewal_due(self) -> bool:
        return boot_seconds() - self._renewed_at >= self.tick_seconds * GOOD_SHARE

    async def try_acquire(self, conn: AsyncConnection) -> float:
        """Acquire leadership if it is free; otherwise return when to try again."""
        settings, sent_at = self._settings, boot_seconds()
        done = await shards.try_acquire_shard(
            conn,
            shard=self.shard,
            owner=self._owner,
            seconds=settings.leader_lease_seconds,
            watches=has_own_session(conn),
        )
        self.of_shards = done.of_shards or self.of_shards
        if done.epoch is None:
            return min(settings.tick_seconds, max(done.free_in or 0.0, 0.01))
        self.epoch, self._renewed_at, self._observed_at = done.epoch, sent_at, 0.0
        self.server = self._link.server
        self._watched = conn if done.is_watched else None
        self._could_be_watched = has_own_session(conn)
        self._count(1)
        self._log.info("leadership_acquired", shard=self.shard, epoch=self.epoch, is_watched=done.is_watched)
        return 0.0

    async def poll_work(self, conn: AsyncConnection) -> PendingWork:
        """Renew the lease when it is time to, and read the pending work. Raises `NotLeader` when leadership is lost."""
        assert self.epoch is not None
        epoch, sent_at, is_renewal = self.epoch, boot_seconds(), self.is_renewal_due
        elapsed = 0.0 if self._observed_at == 0.0 else sent_at - self._observed_at
        work = None
        if not self._polling.is_open:
            work = await self._polling.attempt(
                conn, lambda: self._poll(conn, epoch, elapsed if is_renewal else None, is_renewal=is_renewal)
            )
        if work is None:
            work, self._renewed_at, self._observed_at = await self._poll_renewal_only(conn, epoch), sent_at, 0.0
        elif is_renewal:
            self._renewed_at = self._observed_at = sent_at
            self._watched = conn if work.is_watched else None
            self.of_shards = work.of_shards or self.of_shards
            self._note_mark(work, sent_at)
        return work

    @property
    def has_marked(self) -> bool:
        """Whether a poll wrote a failover mark just now, so that no other part of this process needs to."""
        return boot_seconds() - self._marked_at < MARK_SECONDS

    def _note_mark(self, work: PendingWork, sent_at: float) -> None:
        server = self._link.server
        if work.marked_lsn is None or server is None:
            return
        mark = WalMark(server=server, lsn=work.marked_lsn, is_synchronous=bool(work.is_synchronous))
        if self._guard.follow_up(mark):
            self._marked_at = sent_at

    async def _poll(self, conn: AsyncConnection, epoch: int, elapsed: float | None, *, is_renewal: bool) -> PendingWork:
        settings = self._settings
        return await as_leader(
            lambda: shards.poll_work(
                conn,
                shard=self.shard,
                epoch=epoch,
                lost_after=settings.lost_after_seconds,
                seconds=settings.leader_lease_seconds if is_renewal else None,
                elapsed=elapsed,
                watch=(has_own_session(conn), conn is self._watched),
                mark=self._mark if is_renewal else None,
            ),
            shard=self.shard,
            epoch=epoch,
        )

    @property
    def _mark(self) -> WalMark | None:
        """The newest mark, if it belongs to the connected server. The first mark on a server is written by the
        comparison."""
        known = self._guard.mark
        return known if known is not None and known.server == self._link.server else None

    async def _poll_renewal_only(self, conn: AsyncConnection, epoch: int) -> PendingWork:
        """The fallback when the combined poll fails: leading and firing continue, and the other work is skipped."""
        if not await shards.renew_shard(
            conn, shard=self.shard, epoch=epoch, seconds=self._settings.leader_lease_seconds
        ):
            raise NotLeader(f"epoch {epoch} of shard {self.shard} is over")
        next_fire, read_at = await schedules.next_due(conn, shard=self.shard)
        return PendingWork(
            read_at=read_at,
            is_watched=conn is self._watched,
            next_fire=next_fire,
            next_timer=read_at,
            has_line=None,
            next_expiry=read_at,
            silent=None,
            stranded=None,
            overdue=None,
            with_room=None,
            backfills=None,
            has_arrivals=None,
            next_wake=read_at,
            has_gates=None,
            next_opening=None,
            has_deliveries=None,
            marked_lsn=None,
            is_synchronous=None,
            of_shards=None,
            has_moves=None,
            troubles=[],
        )

    def forget_observation(self) -> None:
        """Silence during that time was not observed (V8): counting starts again."""
        self._observed_at = 0.0

    async def on_lost(self, error: NotLeader) -> None:
        """Another scheduler leads. Close the session, and with it the lock that would make this process look alive."""
        self._log.warning("leadership_lost", shard=self.shard, epoch=self.epoch, error=error)
        metrics.STALE_WRITES_REFUSED.inc()
        self._step_down()
        await self._link.close()

    async def release(self, successor: str | None = None) -> bool:
        """Transfer leadership at once and notify the standbys. Returns whether there was leadership to transfer.

        A named successor takes precedence for as long as it needs to acquire the shard.
        """
        led = self.epoch
        try:
            if led is not None:
                conn = await self._link.get()
                is_transferred = await self._transfer(conn, led, successor)
                if is_transferred and self._settings.listen_notify:
                    await notify(conn, Channel.LEADER)
                return is_transferred
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            self._log.warning("leadership_release_failed", error=error)
        finally:
            if led is not None:
                self._step_down()
            await self._link.close()
        return False

    async def _transfer(self, conn: AsyncConnection, epoch: int, successor: str | None) -> bool:
        if successor is None:
            return await shards.release_shard(conn, shard=self.shard, epoch=epoch)
        return await shards.hand_over(
            conn, shard=self.shard, epoch=epoch, heir=successor, seconds=self._settings.tick_seconds
        )

    async def standby(self) -> None:
        """Another scheduler leads. Close the connection instead of waiting: the server would end the idle session."""
        await self._link.close()

    async def close(self) -> None:
        """The shard is closed: no scheduler leads it, and there is nothing to transfer."""
        self._log.info("shard_closed", shard=self.shard)
        self._step_down()
        await self._link.close()

    def _step_down(self) -> None:
        self.epoch, self._watched = None, None
        self._count(0)

    def _count(self, leads: int) -> None:
        metrics.SHARD_LEADER.labels(shard=str(self.shard)).set(leads)
        if self.shard == 0:
            metrics.LEADER.set(leads)
        metrics.LEADERSHIP_CHANGES.inc()


class LeaderConnection:
    """A further connection of the leader, next to the connection that renews its lease: to the same server, with timeouts bounded
    by the lease. `lock_share`: the share of a job's time that may be spent waiting for a lock."""

    def __init__(self, url: str, leadership: Leadership, settings: Settings, *, lock_share: float) -> None:
        self._leadership, self._settings, self._lock_share = leadership, settings, lock_share
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._bounded: AsyncConnection | None = None

    async def get(self) -> AsyncConnection:
        """Raises NotLeader if the lease was acquired on another server than this connection reaches."""
        conn = await self._link.get()
        if self._link.server != self._leadership.server:
            raise NotLeader(f"shard {self._leadership.shard} was led on another server ({self._leadership.server})")
        if conn is not self._bounded:
            if has_own_session(conn):
                seconds = self._settings.maintenance_timeout_seconds
                await shards.bound_session(
                    conn,
                    statement_seconds=seconds,
                    lock_seconds=seconds * self._lock_share,
                    transaction_seconds=self._settings.leader_lease_seconds,
                )
            self._bounded = conn
        return conn

    async def close(self) -> None:
        await self._link.close()
