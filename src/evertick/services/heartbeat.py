"""A runner's heartbeat, on a thread and a connection of its own: whatever the runner's loop is busy with, leases last.

Sends what the runner holds and hands the reply back to its loop. A second line stands by, and beats while the first one
waits for an answer that may never come. Never decides what to do about a reply.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from evertick.config import Settings
from evertick.domain.failover import Server
from evertick.engine.extend import Extended, Held, extend
from evertick.execution.linux import boot_seconds
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.loop import LONGEST_BACK_OFF_SECONDS, run_loop
from evertick.services.pulse import Pulse
from evertick.store.db import Purpose

_SHORTEST_LIMIT_SECONDS = 1.0
# On a busy machine an answer may take that long without anything being wrong.
_SHORTEST_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One that was answered. `sent_at` counts seconds since boot; `by_spare`: the usual line did not answer in time."""

    reply: Extended
    sent_at: float
    by_spare: bool
    server: Server | None


class Heartbeat:
    """Beats every so many seconds, and at once when asked.

    `held` is called from its thread, `on_beat` on the loop of whoever started it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        url: str,
        session: int,
        held: Callable[[], list[Held]],
        on_beat: Callable[[Beat], None],
        log: Log,
    ) -> None:
        self._url, self._session, self._seconds = url, session, settings.heartbeat_seconds
        self._lost_after_seconds = settings.lost_after_seconds
        self._held, self._on_beat, self._log = held, on_beat, log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._starter = asyncio.get_running_loop()
        self._thread.start()

    def beat_now(self) -> None:
        """From any thread."""
        self._tell(self._wake.set)

    def stop(self) -> None:
        if self._tell(self._end):
            self._thread.join(timeout=5)

    def _tell(self, what: Callable[[], None]) -> bool:
        """Whether its loop will hear it: before it runs and once it is over nobody does."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True

    def _end(self) -> None:
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        asyncio.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        usual, spare = Link(self._url, Purpose.PLANNING), Link(self._url, Purpose.PLANNING)
        async with asyncio.TaskGroup() as group:
            standing_by = group.create_task(self._stand_by(spare, usual))
            # After an outage the first beat must not be later than a beat ever is.
            await run_loop(
                lambda: self._beat_as_usual(usual),
                wake=self._wake,
                stop=self._stop,
                name="heartbeat",
                log=self._log,
                longest_back_off=min(self._seconds / 2, LONGEST_BACK_OFF_SECONDS),
            )
            standing_by.cancel()
        await usual.close()
        await spare.close()

    async def _beat_as_usual(self, line: Link) -> float:
        """Patient: behind a slow network a late answer is better than none."""
        await self._beat(line, self._lost_after_seconds / 2, by_spare=False)
        return self._seconds

    async def _stand_by(self, spare: Link, usual: Link) -> None:
        """Beat on a fresh line while the usual one is overdue. Impatient: what a network swallowed never comes."""

        async def beat_if_overdue() -> float:
            on_time = self._answered + max(1.5 * self._seconds, _SHORTEST_PATIENCE_SECONDS) - time.monotonic()
            if on_time > 0:
                await spare.close()
                return on_time
            await self._beat(spare, self._lost_after_seconds / 4, by_spare=True)
            usual.cut()
            return self._seconds

        await run_loop(
            beat_if_overdue,
            wake=asyncio.Event(),
            stop=asyncio.Event(),
            name="spare_heartbeat",
            log=self._log,
            longest_back_off=min(self._seconds / 2, LONGEST_BACK_OFF_SECONDS),
            pulse=Pulse("spare_heartbeat", is_essential=False),
        )

    async def _beat(self, line: Link, limit_seconds: float, *, by_spare: bool) -> None:
        async with line.within(max(limit_seconds, _SHORTEST_LIMIT_SECONDS)) as conn:
            # Before it leaves: what the database counts from is later than this.
            sent_at, server = boot_seconds(), line.server
            reply = await extend(conn, session=self._session, held=self._held())
        self._answered = time.monotonic()
        # Whoever started us may be gone by now.
        with suppress(RuntimeError):
            beat = Beat(reply=reply, sent_at=sent_at, by_spare=by_spare, server=server)
            self._starter.call_soon_threadsafe(self._on_beat, beat)
