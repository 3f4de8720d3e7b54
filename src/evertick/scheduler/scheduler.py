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
        lead = Leadership(settings, url=url, owner=owner, log=log, shard=FIRST)
        self._waker = Notifier(url, is_enabled=settings.notify, log=log, has_marked=lambda: lead.has_marked)
        self._beside = ReconnectingConnection(url, Purpose.PLANNING)
        self._neighbours = PeerCheck(settings, link=self._beside, on_buried=self._on_buried, log=log)
        self._roster = ShardAssignment(settings, url=url, owner=owner, seat=self._seat, log=log)
        self._notifying = NotificationSender(settings, url=url, lead=lead, waker=self._waker, log=log)
        self._upkeep = Vacuum(settings, url=url, epoch=lead.current_epoch, log=log)
        self.first = self._make_seat(lead)
        self._seats = {FIRST: self.first}
        self._group: asyncio.TaskGroup | None = None
        self.wake = self.first.wake
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Run until `stop` is set; then transfer all leadership at once."""
        async with asyncio.TaskGroup() as seats, asyncio.TaskGroup() as group:
            self._group = seats
            beside = (self._waker, self._neighbours, self._upkeep, self._notifying, self._roster)
            background = [group.create_task(each.run()) for each in beside]
            if self._settings.notify:
                channels = [Channel.PLAN, Channel.JOIN, Channel.LEAD]
                background.append(group.create_task(listen_forever(self._url, channels, self._on_wake, log=self._log)))
            await self.first.run(self.stop)
            for task in background:
                task.cancel()
            for seat in self._seats.values():
                seat.wake.set()
        await self.close()

    async def close(self) -> None:
        """Release all leadership, and close every connection."""
        for seat in self._seats.values():
            await seat.close()
        await self._roster.close()
        await self._notifying.close()
        await self._waker.close()
        await self._beside.close()

    def _seat(self, shard: int) -> ShardLeader:
        """Created on first use. A shard that is led elsewhere or closed costs nothing."""
        if shard not in self._seats:
            lead = Leadership(self._settings, url=self._url, owner=self._owner, log=self._log, shard=shard)
            self._seats[shard] = self._make_seat(lead)
            assert self._group is not None
            self._group.create_task(self._seats[shard].run(self.stop))
        return self._seats[shard]

    def _make_seat(self, lead: Leadership) -> ShardLeader:
        def hear(seen: PendingWork | None, of_shards: int) -> None:
            self._roster.hear(of_shards)
            if seen is not None and lead.shard == FIRST:
                self._notifying.hear(seen)

        return ShardLeader(
            self._settings,
            url=self._url,
            lead=lead,
            waker=self._waker,
            may_take=self._roster.may_take,
            hear=hear,
            log=self._log,
        )

    def _on_wake(self, channel: Channel) -> None:
        if channel is Channel.JOIN:
            self._neighbours.ask()
            return
        if channel is Channel.LEAD:
            self._roster.wake.set()
        for seat in self._seats.values():
            seat.wake.set()

    def _on_buried(self) -> None:
        self._waker.wake(Channel.READY)
