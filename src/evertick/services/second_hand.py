"""The burst worker for many due schedules: while the database stores one batch, the next is read and planned.

The leader calls it when more is due than fits into a batch; it fires half of the schedules on its own connection.
Nothing depends on it: if it makes no progress, the leader fires all of them. A schedule that both take fires once, by
the cursor (V1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from evertick.config import Settings
from evertick.domain.errors import NotLeader
from evertick.engine.fire import Fired, Half, fire
from evertick.services.contained import boot_seconds
from evertick.services.events import Log
from evertick.services.lead import Lead
from evertick.services.led_link import LedLink
from evertick.services.loop import run_loop
from evertick.services.pulse import Pulse

# A batch takes a tenth of that. A worker that has not returned by then may hang, and the leader takes over its half.
LONGEST_BATCH_SECONDS = 0.5
LOCK_SHARE = 0.1
# When another transaction holds a needed lock, the leader knows which schedule to skip: this worker would wait for it
# repeatedly.
REST_SECONDS = 1.0


class SecondHand:
    """`tell` is called with the result of each batch."""

    def __init__(self, settings: Settings, *, url: str, lead: Lead, tell: Callable[[Fired], None], log: Log) -> None:
        self._settings, self._lead, self._tell, self._log = settings, lead, tell, log
        self._link = LedLink(url, lead, settings, lock_share=LOCK_SHARE)
        self._wake = asyncio.Event()
        self._is_called = False
        self._began_at: float | None = None
        self._rests_until = 0.0

    @property
    def half(self) -> Half | None:
        """The leader's part: half of the schedules while this worker makes progress with the others, otherwise all."""
        is_busy = self._began_at is not None and boot_seconds() - self._began_at < LONGEST_BATCH_SECONDS
        return Half.EVEN if is_busy else None

    def call(self) -> None:
        """More is due than fits into one batch."""
        self._is_called = True
        self._wake.set()

    async def run(self) -> None:
        """Run until canceled."""
        never = asyncio.Event()
        name = self._lead.loop_name("second_hand")
        pulse = Pulse(name, is_essential=False)
        await run_loop(self.tick, wake=self._wake, stop=never, name=name, log=self._log, pulse=pulse)

    async def tick(self) -> float:
        epoch = self._lead.current_epoch()
        if self._lead.epoch is None:
            await self._link.close()
        if not self._is_called or epoch is None or boot_seconds() < self._rests_until:
            return self._settings.tick_seconds
        self._is_called = False
        try:
            conn = await self._link.get()
            self._began_at = boot_seconds()
            done = await fire(conn, shard=self._lead.shard, epoch=epoch, batch=self._settings.fire_batch, half=Half.ODD)
        except NotLeader as error:
            self._log.warning("refused", error=error)
            return self._settings.tick_seconds
        finally:
            self._began_at = None
        self._tell(done)
        if done.passed_over:
            self._rests_until = boot_seconds() + REST_SECONDS
            return self._settings.tick_seconds
        if not (done.has_more and done.settled):
            return self._settings.tick_seconds
        self._is_called, self._began_at = True, boot_seconds()
        return 0.0

    async def close(self) -> None:
        await self._link.close()
