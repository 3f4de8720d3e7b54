"""Counts queued tasks for the metrics: only in the leader, periodically, on its own connection.

Never part of planning: it may be slow, fail or be skipped without delaying anything.
"""

from __future__ import annotations

import asyncio

from evertick.services import metrics
from evertick.services.events import Log
from evertick.services.health import value_of
from evertick.services.link import Link
from evertick.services.loop import run_loop
from evertick.services.pulse import Pulse
from evertick.store import queues
from evertick.store.db import Purpose

COUNT_SECONDS = 10.0
# How soon a new leader begins to count.
LOOK_SECONDS = 1.0
# Counting a queue of 10,000 takes about 5 ms. Beyond that the exact number does not matter.
MOST_COUNTED = 10_000
MOST_QUEUES = 100


class QueueDepth:
    def __init__(self, url: str, *, log: Log) -> None:
        self._link, self._log = Link(url, Purpose.PLANNING), log
        self._known: set[str] = set()

    async def run(self) -> None:
        """Run until canceled."""
        never, pulse = asyncio.Event(), Pulse("queue_depth", is_essential=False)
        try:
            await run_loop(self.tick, wake=never, stop=never, name="queue_depth", log=self._log, pulse=pulse)
        finally:
            await self._link.close()

    async def tick(self) -> float:
        if not value_of(metrics.LEADER):
            await self._forget()
            return LOOK_SECONDS
        counted = await queues.depths(await self._link.get(), cap=MOST_COUNTED, most=MOST_QUEUES)
        for each in counted:
            metrics.QUEUE_DEPTH.labels(queue=each.queue).set(each.depth)
        # A queue that is empty now is reported as 0, not left at its last count.
        seen = {each.queue for each in counted}
        for queue in self._known - seen:
            metrics.QUEUE_DEPTH.labels(queue=queue).set(0)
        self._known |= seen
        return COUNT_SECONDS

    async def _forget(self) -> None:
        """Another scheduler counts: two that export the same series would be added up."""
        if self._known:
            metrics.QUEUE_DEPTH.clear()
            self._known = set()
            await self._link.close()
