"""The scheduler: leads its share of the shards, and runs the singleton jobs of an installation.

Each shard that it leads or could lead has a shard leader (scheduler/shard_leader.py). With one shard, the default, the first one
leads or stands by on its own; with more, the shard assignment decides which to acquire and which to transfer.
"""

from __future__ import annotations

import asyncio

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel
from evertick.db.queries.shards import PendingWork
from evertick.observability.logging import Log
from evertick.runner.events import PeerDied
from evertick.runner.peer_check import PeerCheck
from evertick.runtime.connections import Notifier, ReconnectingConnection, listen_forever
from evertick.scheduler.leadership import Leadership
from evertick.scheduler.notification_sender import NotificationSender
from evertick.scheduler.shard_assignment import ShardAssignment
from evertick.scheduler.shard_leader import ShardLeader
from evertick.scheduler.vacuum import Vacuum

# The leader of this shard runs the singleton jobs: vacuum, notifications, and what only its poll reports.
FIRST = 0


class Scheduler:
    """One scheduler process. It plans only while it leads; standby costs one statement per tick."""

    def __init__(self, settings: Settings, *, url: str, owner: str, log: Log) -> None:
        self._settings, self._url, self._owner, self._log = settings, url, owner, log
        leadership = Leadership(settings, url=url, owner=owner, log=log, shard=FIRST)
        self._waker = Notifier(
            url, is_enabled=settings.listen_notify, log=log, has_marked=lambda: leadership.has_marked
        )
        self._beside = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._peers = PeerCheck(settings, link=self._beside, put=self._on_peer_died, log=log)
        self._assignment = ShardAssignment(settings, url=url, owner=owner, leader_of=self._leader_of, log=log)
        self._notifying = NotificationSender(settings, url=url, leadership=leadership, waker=self._waker, log=log)
        self._upkeep = Vacuum(settings, url=url, epoch=leadership.current_epoch, log=log)
        self.first = self._make_leader(leadership)
        self._leaders = {FIRST: self.first}
        self._group: asyncio.TaskGroup | None = None
        self.wake = self.first.wake
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Run until `stop` is set; then transfer all leadership at once."""
        async with asyncio.TaskGroup() as leaders, asyncio.TaskGroup() as group:
            self._group = leaders
            beside = (self._waker, self._peers, self._upkeep, self._notifying, self._assignment)
            background = [group.create_task(each.run()) for each in beside]
            if self._settings.listen_notify:
                channels = [Channel.SCHEDULE, Channel.RUNNER, Channel.LEADER]
                background.append(group.create_task(listen_forever(self._url, channels, self._on_wake, log=self._log)))
            await self.first.run(self.stop)
            for task in background:
                task.cancel()
            for leader in self._leaders.values():
                leader.wake.set()
        await self.close()

    async def close(self) -> None:
        """Release all leadership, and close every connection."""
        for leader in self._leaders.values():
            await leader.close()
        await self._assignment.close()
        await self._notifying.close()
        await self._waker.close()
        await self._beside.close()

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
                self._notifying.on_poll(work)

        return ShardLeader(
            self._settings,
            url=self._url,
            leadership=leadership,
            waker=self._waker,
            may_acquire=self._assignment.may_acquire,
            publish=publish,
            log=self._log,
        )

    def _on_wake(self, channel: Channel) -> None:
        if channel is Channel.RUNNER:
            self._peers.list_soon()
            return
        if channel is Channel.LEADER:
            self._assignment.wake.set()
        for leader in self._leaders.values():
            leader.wake.set()

    def _on_peer_died(self, _: PeerDied) -> None:
        self._waker.wake(Channel.TASKS)
