"""The lead of one shard as this replica knows it: taken, renewed, lost, and given up.

The database decides who leads. What is known here only keeps a replica from asking for what it would be refused: it never
plans past the end of its lease by its own clock, counted from when it sent the renewal that was acknowledged last.
"""

from __future__ import annotations

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.errors import NotLeader, PostgresUnavailable
from evertick.domain.failover import Mark, Server
from evertick.engine.fenced import as_leader
from evertick.services import metrics
from evertick.services.contained import Step, boot_seconds
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.store import schedules, shards, sharing
from evertick.store.db import Purpose
from evertick.store.guard import guard_of
from evertick.store.line import keeps_session
from evertick.store.shards import Seen
from evertick.store.wake import Channel, notify

# Of the lease: what is left for a statement that was sent in time, and how long one may take.
GOOD_SHARE, STATEMENT_SHARE, LOCK_SHARE = 0.9, 0.5, 0.05
# Of a tick: how soon a leader whose end nobody could see asks for the session lock again. Who was frozen before it has it until the
# server ends that session, which is about when the lease was over: a moment later it is free.
UNWATCHED_SHARE = 0.2
# How long a mark of ours counts as just made. With the usual tick the next one comes before.
MARK_SECONDS = 1.5


class Lead:
    """`epoch` is None while somebody else leads. On its connection the session lock is held, if it can be."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log, shard: int = 0) -> None:
        self._settings, self._owner, self._log, self.shard = settings, owner, log, shard
        self._link, self._guard = Link(url, Purpose.PLANNING), guard_of(url)
        self._bounded: AsyncConnection | None = None
        self._watched: AsyncConnection | None = None
        self._could_be_watched = False
        self._renewed_at = self._listened_at = self._marked_at = 0.0
        self._looking = Step("look", log=log)
        self.epoch: int | None = None
        self.led_on: Server | None = None
        # How many shards are led by anybody, as far as we have heard.
        self.of_shards = 1

    async def connection(self) -> AsyncConnection:
        """The leader's own, with timeouts that fit the lease."""
        conn = await self._link.get()
        if self.epoch is not None and self._link.server != self.led_on:
            # A standby took over, and may have lost our lead: the same epoch can be somebody else's there.
            await self.lose(
                NotLeader(f"epoch {self.epoch} of shard {self.shard} was of another server ({self.led_on})")
            )
            conn = await self._link.get()
        if conn is not self._bounded:
            lease = self._settings.leader_lease_seconds
            if keeps_session(conn):
                await shards.bound_session(
                    conn,
                    statement_seconds=lease * STATEMENT_SHARE,
                    lock_seconds=lease * LOCK_SHARE,
                    transaction_seconds=lease,
                    idle_seconds=lease,
                )
            self._bounded = conn
        return conn

    def cut(self) -> None:
        """Stop waiting for an answer that does not come."""
        self._link.cut()

    @property
    def may_plan(self) -> bool:
        lasts = self._settings.leader_lease_seconds * GOOD_SHARE
        return self.epoch is not None and boot_seconds() < self._renewed_at + lasts

    def loop_name(self, name: str) -> str:
        """Of a loop that there is one of for each shard. Most installations have one shard, and its loops have plain names."""
        return name if self.shard == 0 else f"{name}_{self.shard}"

    def current_epoch(self) -> int | None:
        """By what right this replica may plan now; None if it may not."""
        return self.epoch if self.may_plan else None

    @property
    def tick_seconds(self) -> float:
        """How long until the next renewal."""
        tick = self._settings.tick_seconds
        return tick * UNWATCHED_SHARE if self._watched is None and self._could_be_watched else tick

    @property
    def is_renewal_due(self) -> bool:
        return boot_seconds() - self._renewed_at >= self.tick_seconds * GOOD_SHARE

    async def stand_by(self, conn: AsyncConnection) -> float:
        """Take the lead if it is free; if it is not, returns when to ask again."""
        settings, sent_at = self._settings, boot_seconds()
        done = await shards.stand_by(
            conn,
            shard=self.shard,
            owner=self._owner,
            seconds=settings.leader_lease_seconds,
            watches=keeps_session(conn),
        )
        self.of_shards = done.of_shards or self.of_shards
        if done.epoch is None:
            return min(settings.tick_seconds, max(done.free_in or 0.0, 0.01))
        self.epoch, self._renewed_at, self._listened_at = done.epoch, sent_at, 0.0
        self.led_on = self._link.server
        self._watched = conn if done.is_watched else None
        self._could_be_watched = keeps_session(conn)
        self._count(1)
        self._log.info("lead", shard=self.shard, epoch=self.epoch, is_watched=done.is_watched)
        return 0.0

    async def look(self, conn: AsyncConnection) -> Seen:
        """Renew the lease when it is time to, and see what there is to do. Raises `NotLeader` when it is over."""
        assert self.epoch is not None
        epoch, sent_at, renews = self.epoch, boot_seconds(), self.is_renewal_due
        elapsed = 0.0 if self._listened_at == 0.0 else sent_at - self._listened_at
        seen = None
        if not self._looking.is_resting:
            seen = await self._looking.attempt(
                conn, lambda: self._look(conn, epoch, elapsed if renews else None, renews=renews)
            )
        if seen is None:
            seen, self._renewed_at, self._listened_at = await self._look_plainly(conn, epoch), sent_at, 0.0
        elif renews:
            self._renewed_at = self._listened_at = sent_at
            self._watched = conn if seen.is_watched else None
            self.of_shards = seen.of_shards or self.of_shards
            self._note_mark(seen, sent_at)
        return seen

    @property
    def has_marked(self) -> bool:
        """Whether a look made a mark just now, so that nobody else in this process need make one."""
        return boot_seconds() - self._marked_at < MARK_SECONDS

    def _note_mark(self, seen: Seen, sent_at: float) -> None:
        server = self._link.server
        if seen.marked_lsn is None or server is None:
            return
        mark = Mark(server=server, lsn=seen.marked_lsn, is_synchronous=bool(seen.is_synchronous))
        if self._guard.follow_up(mark):
            self._marked_at = sent_at

    async def _look(self, conn: AsyncConnection, epoch: int, elapsed: float | None, *, renews: bool) -> Seen:
        settings = self._settings
        return await as_leader(
            lambda: shards.look(
                conn,
                shard=self.shard,
                epoch=epoch,
                lost_after=settings.lost_after_seconds,
                seconds=settings.leader_lease_seconds if renews else None,
                elapsed=elapsed,
                watch=(keeps_session(conn), conn is self._watched),
                mark=self._mark if renews else None,
            ),
            shard=self.shard,
            epoch=epoch,
        )

    @property
    def _mark(self) -> Mark | None:
        """The newest mark, if it is of the server that we talk to. The first one there is made by who compares them."""
        known = self._guard.mark
        return known if known is not None and known.server == self._link.server else None

    async def _look_plainly(self, conn: AsyncConnection, epoch: int) -> Seen:
        """When something is wrong with the whole of it: leading and firing go on, and the rest is left to others."""
        if not await shards.renew(conn, shard=self.shard, epoch=epoch, seconds=self._settings.leader_lease_seconds):
            raise NotLeader(f"epoch {epoch} of shard {self.shard} is over")
        next_fire, read_at = await schedules.next_due(conn, shard=self.shard)
        return Seen(
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

    def forget_silence(self) -> None:
        """Whatever silence there was meanwhile, nobody watched it (V8): counting starts anew."""
        self._listened_at = 0.0

    async def lose(self, error: NotLeader) -> None:
        """Somebody else leads. The session goes, and with it the lock that would make us look alive."""
        self._log.warning("deposed", shard=self.shard, epoch=self.epoch, error=error)
        metrics.STALE_WRITES_REFUSED.inc()
        self._step_down()
        await self._link.close()

    async def resign(self, heir: str | None = None) -> bool:
        """Hand over at once, and tell whoever stands by. Whether there was something to hand over.

        To an heir it goes before anybody else, for as long as it takes to come and get it.
        """
        led = self.epoch
        try:
            if led is not None:
                conn = await self._link.get()
                has_handed_over = await self._give_up(conn, led, heir)
                if has_handed_over and self._settings.notify:
                    await notify(conn, Channel.LEAD)
                return has_handed_over
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            self._log.warning("not_resigned", error=error)
        finally:
            if led is not None:
                self._step_down()
            await self._link.close()
        return False

    async def _give_up(self, conn: AsyncConnection, epoch: int, heir: str | None) -> bool:
        if heir is None:
            return await shards.resign(conn, shard=self.shard, epoch=epoch)
        return await sharing.hand_over(
            conn, shard=self.shard, epoch=epoch, heir=heir, seconds=self._settings.tick_seconds
        )

    async def rest(self) -> None:
        """Another leads, and is not waited for here: the server would end the session for being quiet."""
        await self._link.close()

    async def lay_down(self) -> None:
        """The shard is closed: nobody leads it, and there is nothing to hand over."""
        self._log.info("closed", shard=self.shard)
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
