"""The scheduler: leads its share of the shards, and runs the singleton jobs of an installation.

Each shard that it leads or could lead has a shard leader (scheduler/shard_leader.py). With one shard, the default, the first one
leads or stands by on its own; with more, the shard assignment decides which to acquire and which to transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.connection import has_own_session
from evertick.db.notify import Channel
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.domain.errors import PostgresUnavailable
from evertick.domain.shards import ShardDecision, ShardStatus, decide
from evertick.engine.shards import PendingWork, set_shard_count, survey_shards
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.runner.database_access import DatabasePeers
from evertick.runner.events import PeerDied
from evertick.runner.peer_check import PeerCheck
from evertick.runtime.connections import Notifier, ReconnectingConnection, listen_forever
from evertick.runtime.loop import in_background, run_loop
from evertick.scheduler.leadership import Leadership
from evertick.scheduler.notification_sender import NotificationSender
from evertick.scheduler.shard_leader import ShardLeader
from evertick.scheduler.vacuum import Vacuum

# The leader of this shard runs the singleton jobs: vacuum, notifications, and what only its poll reports.
FIRST = 0


class Scheduler:
    """One scheduler process. It plans only while it leads; standby costs one statement per tick."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log) -> None:
        self._settings, self._url, self._owner, self._log = settings, url, owner, log
        leadership = Leadership(settings, url=url, owner=owner, log=log, shard=FIRST)
        is_enabled, has_marked = settings.listen_notify, lambda: leadership.has_marked
        self._notifier = Notifier(url, is_enabled=is_enabled, log=log, has_marked=has_marked)
        self._connection = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._peers = PeerCheck(
            settings, peers=DatabasePeers(self._connection, settings=settings), put=self._on_peer_died, log=log
        )
        self._assignment = ShardAssignment(settings, url=url, owner=owner, leader_of=self._leader_of, log=log)
        self._sender = NotificationSender(leadership, notifier=self._notifier, log=log)
        self._vacuum = Vacuum(settings, url=url, epoch=leadership.current_epoch, log=log)
        self.first = self._make_leader(leadership)
        self._leaders = {FIRST: self.first}
        self._group: asyncio.TaskGroup | None = None
        self.wake = self.first.wake
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Run until `stop` is set; then transfer all leadership at once."""
        services = (self._notifier, self._peers, self._vacuum, self._sender, self._assignment)
        background = [each.run() for each in services]
        if self._settings.listen_notify:
            channels = [Channel.SCHEDULE, Channel.RUNNER, Channel.LEADER]
            background.append(listen_forever(self._url, channels, self._on_wake, log=self._log))
        async with asyncio.TaskGroup() as self._group:
            async with in_background(*background):
                await self.first.run(self.stop)
                self._wake_leaders()
        await self.close()

    async def close(self) -> None:
        """Release all leadership, and close every connection."""
        for leader in self._leaders.values():
            await leader.close()
        await self._assignment.close()
        await self._sender.close()
        await self._notifier.close()
        await self._connection.close()

    def _leader_of(self, shard: int) -> ShardLeader:
        """Created on first use. A shard that is led elsewhere or closed costs nothing."""
        if shard not in self._leaders:
            leadership = Leadership(self._settings, url=self._url, owner=self._owner, log=self._log, shard=shard)
            self._leaders[shard] = self._make_leader(leadership)
            assert self._group is not None
            self._group.create_task(self._leaders[shard].run(self.stop))
        return self._leaders[shard]

    def _make_leader(self, leadership: Leadership) -> ShardLeader:
        def publish(work: PendingWork | None, shard_count: int) -> None:
            self._assignment.note_shard_count(shard_count)
            if work is not None and leadership.shard == FIRST:
                self._sender.on_poll(work)

        may_acquire = self._assignment.may_acquire
        return ShardLeader(leadership, notifier=self._notifier, may_acquire=may_acquire, publish=publish, log=self._log)

    def _on_wake(self, channel: Channel) -> None:
        if channel is Channel.RUNNER:
            self._peers.list_soon()
            return
        if channel is Channel.LEADER:
            self._assignment.wake.set()
        self._wake_leaders()

    def _wake_leaders(self) -> None:
        for leader in self._leaders.values():
            leader.wake.set()

    def _on_peer_died(self, _: PeerDied) -> None:
        self._notifier.wake(Channel.TASKS)


# Shares of a tick: how long a free shard beyond this scheduler's share is left to the others, and how soon to check
# again while one is free.
PATIENCE_SHARE, AGAIN_SHARE = 0.25, 0.1
# A shard that its successor did not acquire is not offered to the same one again at once: it is counted as alive, yet
# cannot lead.
OFFER_AGAIN_TICKS = 10
# A scheduler that leads all shards alone has nothing to acquire, and checks less often for new schedulers.
ALONE_TICKS = 3


class ShardAssignment:
    """Which shards this scheduler acquires, and which it transfers, when there are several.

    With one shard it queries nothing: the first shard leader stands by on its own. With more, one statement per tick
    reads the assignment and records that this scheduler is alive. It decides nothing about safety: the lease and the
    fence do that for each shard.
    """

    def __init__(
        self, settings: Settings, *, url: str, owner: str, leader_of: Callable[[int], ShardLeader], log: Log
    ) -> None:
        self._settings, self._owner, self._leader_of, self._log = settings, owner, leader_of, log
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._of_shards = 1
        self._wanted: set[int] = set()
        self._free_since: dict[int, float] = {}
        self._offered: dict[tuple[int, str], float] = {}
        self._is_counted = False
        self._is_count_set = settings.shards is None
        self.wake = asyncio.Event()

    def may_acquire(self, shard: int) -> bool:
        return shard in self._wanted if self._of_shards > 1 else shard == 0

    def note_shard_count(self, shard_count: int) -> None:
        """The number of shards with a leader; known from every renewal, so that an installation with one shard needs no
        query."""
        if shard_count != self._of_shards:
            self._of_shards = shard_count
            self.wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        await run_loop(self.tick, wake=self.wake, name="roster", log=self._log)

    async def tick(self) -> float:
        if not self._is_count_set and self._settings.shards is not None:
            conn = await self._link.get()
            await set_shard_count(conn, shards=self._settings.shards, actor=Actor(self._owner), if_never_chosen=True)
            self._is_count_set = True
        if self._of_shards <= 1:
            await self._leave()
            return self._settings.tick_seconds
        conn = await self._link.get()
        self._is_counted = True
        lease, watches = self._settings.leader_lease_seconds, has_own_session(conn)
        shares = await survey_shards(conn, owner=self._owner, seconds=lease, watches=watches)
        self._of_shards = len(shares)
        now = boot_seconds()
        for each in shares:
            # The successor has acquired it.
            self._offered.pop((each.shard, each.leader or ""), None)
        patience = self._settings.tick_seconds * PATIENCE_SHARE
        overdue = {shard for shard, since in self._free_since.items() if now - since >= patience}
        decision = decide(self._owner, shares, overdue=overdue)
        self._act(decision, now)
        return self._pause(shares, decision)

    async def close(self) -> None:
        try:
            await self._leave()
        except (psycopg.Error, PostgresUnavailable, OSError) as error:
            self._log.warning("deregister_failed", error=error)
        await self._link.close()

    async def _leave(self) -> None:
        self._wanted, self._free_since = set(), {}
        if self._is_counted:
            await shards.announce_leave(await self._link.get(), owner=self._owner)
            self._is_counted = False

    def _act(self, decision: ShardDecision, now: float) -> None:
        self._free_since = {shard: self._free_since.get(shard, now) for shard in decision.leave}
        self._wanted = set(decision.take)
        for shard in decision.take:
            self._leader_of(shard).wake.set()
        if decision.give is None or now < self._offered.get(decision.give, 0.0):
            return
        shard, successor = decision.give
        self._offered[decision.give] = now + OFFER_AGAIN_TICKS * self._settings.tick_seconds
        self._leader_of(shard).transfer_to(successor)

    def _pause(self, shares: list[ShardStatus], decision: ShardDecision) -> float:
        tick = self._settings.tick_seconds
        if decision.take or decision.leave:
            return tick * AGAIN_SHARE
        if all(each.leader == self._owner and each.live == [self._owner] for each in shares):
            return min(tick * ALONE_TICKS, self._settings.leader_lease_seconds / 2)
        ends = [each.free_in for each in shares if each.free_in is not None and each.free_in > 0]
        return min([tick, *ends])
