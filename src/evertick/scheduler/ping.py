"""Tells a monitor elsewhere that this installation is alive: only while every due instant is accounted for, so that the
monitor raises an alert when all is silent here.

On its own connection and in a thread: a monitor that hangs or fails delays nothing.
"""

from __future__ import annotations

import asyncio

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.queries.monitoring import checkins
from evertick.domain.errors import DeliveryFailed
from evertick.notifications import webhook
from evertick.notifications.webhook import SEND_SECONDS, Post
from evertick.observability import metrics
from evertick.observability.health import LoopHealth, value_of
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop

PING_SECONDS = 60.0
# How soon a new leader pings.
IDLE_SECONDS = 2.0
# A change of leader takes up to 6 s, and a locked schedule can take a few more.
LATE_SECONDS = 60.0


class Ping:
    def __init__(self, settings: Settings, *, url: str, target: str, log: Log) -> None:
        self._settings, self._target, self._log = settings, target, log
        self._link = ReconnectingConnection(url, Purpose.READ)
        self._problems = 0

    async def run(self) -> None:
        """Run until canceled."""
        pulse = LoopHealth("ping", longest_tick_seconds=60.0, is_essential=False)
        try:
            await run_loop(self.tick, name="ping", log=self._log, pulse=pulse)
        finally:
            await self._link.close()

    async def tick(self) -> float:
        if not value_of(metrics.LEADER):
            return IDLE_SECONDS
        problems = await checkins.unaccounted(await self._link.get(), late_seconds=LATE_SECONDS)
        if problems:
            if not self._problems:
                self._log.warning("ping_skipped", problems=problems)
            self._problems = problems
            return IDLE_SECONDS
        self._problems = 0
        metrics.PINGS.labels(outcome=await self._send()).inc()
        return PING_SECONDS

    async def _send(self) -> str:
        post = Post(url=self._target, body=b"", delivery="ping", allowed=self._settings.webhook_allowed_networks)
        try:
            async with asyncio.timeout(2 * SEND_SECONDS):
                await asyncio.to_thread(webhook.send, post, lambda _: None)
        except (DeliveryFailed, OSError, TimeoutError) as error:
            # The address may be a secret.
            reason = str(error).replace(self._target, "…") or type(error).__name__
            self._log.warning("ping_failed", error=reason)
            return "failed"
        return "sent"
