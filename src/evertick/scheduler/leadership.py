"""Leadership of one shard from this scheduler's point of view: acquired, renewed, lost and released.

The database decides which scheduler leads. The local state only avoids requests that would be refused: a leader never
plans past the end of its lease by its own clock, counted from when the last acknowledged renewal was sent.
"""

from __future__ import annotations

from typing import TypedDict

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.connection import has_own_session
from evertick.db.failover import guard_of
from evertick.db.notify import Channel, notify
from evertick.db.queries import schedules, shards
from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.domain.failover import Server, WalMark
from evertick.engine.shards import PendingWork, poll_work, release_shard, renew_shard, try_acquire_shard
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runtime.circuit_breaker import CircuitBreaker
from evertick.runtime.connections import ReconnectingConnection

# Shares of the lease: how much of it is used for sending statements, the statement timeout, and the lock timeout.
GOOD_SHARE, STATEMENT_SHARE, LOCK_SHARE = 0.9, 0.5, 0.05
# Share of a tick: how soon a leader without the session lock asks for it again. A frozen predecessor keeps the lock
# until the server ends its session, which is about when its lease expires.
UNWATCHED_SHARE = 0.2
# How long a failover mark counts as fresh. With the default tick the next one comes earlier.
MARK_SECONDS = 1.5


class LeaderKey(TypedDict):
    """The arguments with which a leader calls its verbs."""

    shard: int
    epoch: int


class Leadership:
    """`epoch` is None while another scheduler leads. Its connection holds the session lock, if possible."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log, shard: int = 0) -> None:
        self.settings, self.url, self._owner, self._log, self.shard = settings, url, owner, log, shard
        self._link, self._guard = ReconnectingConnection(url, Purpose.SCHEDULER), guard_of(url)
        self._bounded: AsyncConnection | None = None
        self._watched: AsyncConnection | None = None
        self._could_be_watched = False
        self._renewed_at = self._observed_at = self._marked_at = 0.0
        self._polling = CircuitBreaker("look", log=log)
        self.epoch: int | None = None
        self.server: Server | None = None
        # The number of shards that are led by any scheduler, as far as known.
        self.shard_count = 1

    async def connection(self) -> AsyncConnection:
        """The leader's connection, with timeouts that fit the lease."""
        conn = await self._link.get()
        if self.epoch is not None and self._link.server != self.server:
            # A standby took over and may have lost this leadership: there, another scheduler can have the same epoch.
            lost = f"epoch {self.epoch} of shard {self.shard} belongs to another server ({self.server})"
            await self.on_lost(NotLeader(lost))
            conn = await self._link.get()
        if conn is not self._bounded:
            lease = self.settings.leader_lease_seconds
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
        lasts = self.settings.leader_lease_seconds * GOOD_SHARE
        return self.epoch is not None and boot_seconds() < self._renewed_at + lasts

    def loop_name(self, name: str) -> str:
        """The name of a loop that exists once per shard. Most installations have one shard, whose loops have plain
        names."""
        return name if self.shard == 0 else f"{name}_{self.shard}"

    @property
    def key(self) -> LeaderKey:
        if self.epoch is None:
            raise NotLeader(f"shard {self.shard} is led by another scheduler")
        return {"shard": self.shard, "epoch": self.epoch}

    def current_epoch(self) -> int | None:
        """The epoch with which this scheduler may plan now; None if it may not."""
        return self.epoch if self.may_plan else None

    @property
    def tick_seconds(self) -> float:
        """Seconds until the next renewal."""
        tick = self.settings.tick_seconds
        return tick * UNWATCHED_SHARE if self._watched is None and self._could_be_watched else tick

    @property
    def is_renewal_due(self) -> bool:
        return boot_seconds() - self._renewed_at >= self.tick_seconds * GOOD_SHARE

    async def try_acquire(self, conn: AsyncConnection) -> float:
        """Acquire leadership if it is free; otherwise return when to try again."""
        settings, sent_at, watches = self.settings, boot_seconds(), has_own_session(conn)
        lease = settings.leader_lease_seconds
        done = await try_acquire_shard(conn, shard=self.shard, owner=self._owner, seconds=lease, watches=watches)
        self.shard_count = done.shard_count or self.shard_count
        if done.epoch is None:
            return min(settings.tick_seconds, max(done.free_in or 0.0, 0.01))
        self.epoch, self._renewed_at, self._observed_at = done.epoch, sent_at, 0.0
        self.server = self._link.server
        self._watched = conn if done.has_session_lock else None
        self._could_be_watched = watches
        self._count(1)
        self._log.info("leadership_acquired", shard=self.shard, epoch=self.epoch, is_watched=done.has_session_lock)
        return 0.0

    async def poll_work(self, conn: AsyncConnection) -> PendingWork:
        """Renew the lease when it is time to, and read the pending work. Raises `NotLeader` when leadership is lost."""
        assert self.epoch is not None
        epoch, sent_at, is_renewal = self.epoch, boot_seconds(), self.is_renewal_due
        elapsed = 0.0 if self._observed_at == 0.0 else sent_at - self._observed_at

        async def poll() -> PendingWork:
            mark = self._mark if is_renewal else None
            return await poll_work(
                conn,
                shard=self.shard,
                epoch=epoch,
                lost_after=self.settings.lost_after_seconds,
                seconds=self.settings.leader_lease_seconds if is_renewal else None,
                elapsed=elapsed if is_renewal else None,
                watches=has_own_session(conn),
                is_watched=conn is self._watched,
                system_id=mark.server.system_id if mark else None,
                timeline=mark.server.timeline if mark else None,
                lsn=mark.lsn if mark else None,
            )

        work = None if self._polling.is_open else await self._polling.attempt(conn, poll)
        if work is None:
            work, self._renewed_at, self._observed_at = await self._poll_renewal_only(conn, epoch), sent_at, 0.0
        elif is_renewal:
            self._renewed_at = self._observed_at = sent_at
            self._watched = conn if work.has_session_lock else None
            self.shard_count = work.shard_count or self.shard_count
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

    @property
    def _mark(self) -> WalMark | None:
        """The newest mark, if it belongs to the connected server. The first mark on a server is written by the
        comparison."""
        known = self._guard.mark
        return known if known is not None and known.server == self._link.server else None

    async def _poll_renewal_only(self, conn: AsyncConnection, epoch: int) -> PendingWork:
        """The fallback when the combined poll fails: leading and firing continue, and the other work is skipped."""
        if not await renew_shard(conn, shard=self.shard, epoch=epoch, seconds=self.settings.leader_lease_seconds):
            raise NotLeader(f"epoch {epoch} of shard {self.shard} is over")
        next_fire, read_at = await schedules.next_due(conn, shard=self.shard)
        return PendingWork(
            read_at=read_at,
            has_session_lock=conn is self._watched,
            next_fire=next_fire,
            next_timer=read_at,
            next_expiry=read_at,
            next_wake=read_at,
        )

    def forget_observation(self) -> None:
        """Silence during that time was not observed (V8): counting starts again."""
        self._observed_at = 0.0

    async def on_lost(self, error: NotLeader) -> None:
        """Another scheduler leads. Close the session, and with it the lock that would make this process look alive."""
        self._log.warning("leadership_lost", shard=self.shard, epoch=self.epoch, error=error)
        metrics.STALE_WRITES_REFUSED.inc()
        await self._step_down()

    async def release(self, successor: str | None = None) -> bool:
        """Transfer leadership at once and notify the standbys. Returns whether there was leadership to transfer.

        A named successor takes precedence for as long as it needs to acquire the shard.
        """
        led = self.epoch
        try:
            if led is not None:
                conn = await self._link.get()
                is_transferred = await release_shard(
                    conn,
                    shard=self.shard,
                    epoch=led,
                    successor=successor,
                    successor_seconds=None if successor is None else self.settings.tick_seconds,
                )
                if is_transferred and self.settings.listen_notify:
                    await notify(conn, Channel.LEADER)
                return is_transferred
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            self._log.warning("leadership_release_failed", error=error)
        finally:
            await (self.standby() if led is None else self._step_down())
        return False

    async def standby(self) -> None:
        """Another scheduler leads. Close the connection instead of waiting: the server would end the idle session."""
        await self._link.close()

    async def close(self) -> None:
        """The shard is closed: no scheduler leads it, and there is nothing to transfer."""
        self._log.info("shard_closed", shard=self.shard)
        await self._step_down()

    async def _step_down(self) -> None:
        self.epoch, self._watched = None, None
        self._count(0)
        await self._link.close()

    def _count(self, leads: int) -> None:
        metrics.SHARD_LEADER.labels(shard=str(self.shard)).set(leads)
        if self.shard == 0:
            metrics.LEADER.set(leads)
        metrics.LEADERSHIP_CHANGES.inc()


class LeaderConnection:
    """A further connection of the leader, next to the connection that renews its lease: to the same server, with timeouts bounded
    by the lease. `lock_share`: the share of a job's time that may be spent waiting for a lock."""

    def __init__(self, leadership: Leadership, *, lock_share: float) -> None:
        self._leadership, self._lock_share = leadership, lock_share
        self._link = ReconnectingConnection(leadership.url, Purpose.SCHEDULER)
        self._bounded: AsyncConnection | None = None

    async def get(self) -> AsyncConnection:
        """Raises NotLeader if the lease was acquired on another server than this connection reaches."""
        conn = await self._link.get()
        if self._link.server != self._leadership.server:
            raise NotLeader(f"shard {self._leadership.shard} was led on another server ({self._leadership.server})")
        if conn is not self._bounded:
            if has_own_session(conn):
                settings = self._leadership.settings
                seconds = settings.maintenance_timeout_seconds
                await shards.bound_session(
                    conn,
                    statement_seconds=seconds,
                    lock_seconds=seconds * self._lock_share,
                    transaction_seconds=settings.leader_lease_seconds,
                )
            self._bounded = conn
        return conn

    async def close(self) -> None:
        await self._link.close()
