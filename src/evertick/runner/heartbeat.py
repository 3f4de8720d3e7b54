"""A runner's heartbeat, in its own thread and on its own connection: leases are extended however busy the runner's loop
is.

Sends the list of held attempts and puts the reply into the session's queue. A spare connection sends heartbeats while the
first one waits for an answer that may never come. Never decides how to act on a reply.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from evertick.config import Settings
from evertick.domain.attempt import AttemptRef
from evertick.observability.logging import Log
from evertick.runner.access import HeartbeatLine
from evertick.runner.events import HeartbeatAnswered
from evertick.runtime.loop import run_loop

_SHORTEST_LIMIT_SECONDS = 1.0
# On a busy machine an answer may take this long although nothing is wrong.
_SHORTEST_PATIENCE_SECONDS = 0.5


class Heartbeat:
    """Sends a heartbeat at each interval, and at once on request.

    `held` is called in its thread, `put` in the event loop that started it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_line: Callable[[], HeartbeatLine],
        held: Callable[[], list[AttemptRef]],
        put: Callable[[HeartbeatAnswered], None],
        log: Log,
    ) -> None:
        self._open_line, self._seconds = open_line, settings.heartbeat_seconds
        self._lost_after_seconds = settings.lost_after_seconds
        self._held, self._put, self._log = held, put, log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._answered = time.monotonic()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._beat_until_stopped()), name="heartbeat", daemon=True
        )

    def start(self) -> None:
        self._starter = asyncio.get_running_loop()
        self._thread.start()

    def beat_now(self) -> None:
        """Send a heartbeat now. Safe to call from any thread; before `start` it has no effect."""
        self._call(self._wake.set)

    def stop(self) -> None:
        if self._call(self._end):
            self._thread.join(timeout=5)

    def _call(self, action: Callable[[], None]) -> bool:
        """Returns whether the heartbeat's loop will do it: not before it runs, and not after it has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            return False
        return True

    def _end(self) -> None:
        self._stop.set()
        self._wake.set()

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        usual, spare = self._open_line(), self._open_line()
        async with asyncio.TaskGroup() as group:
            standing_by = group.create_task(self._stand_by(spare, usual))
            beat = partial(self._beat_as_usual, usual)
            await run_loop(beat, wake=self._wake, stop=self._stop, name="heartbeat", log=self._log)
            standing_by.cancel()
        await usual.close()
        await spare.close()

    async def _beat_as_usual(self, line: HeartbeatLine) -> float:
        """Patient: behind a slow network a late answer is better than none."""
        await self._beat(line, self._lost_after_seconds / 2, is_spare=False)
        return self._seconds

    async def _stand_by(self, spare: HeartbeatLine, usual: HeartbeatLine) -> None:
        """Send heartbeats on a new connection while the usual one is overdue. Impatient: a packet that the network
        dropped never arrives."""

        async def beat_if_overdue() -> float:
            on_time = self._answered + max(1.5 * self._seconds, _SHORTEST_PATIENCE_SECONDS) - time.monotonic()
            if on_time > 0:
                await spare.close()
                return on_time
            await self._beat(spare, self._lost_after_seconds / 4, is_spare=True)
            usual.abort()
            return self._seconds

        await run_loop(beat_if_overdue, name="spare_heartbeat", log=self._log, is_essential=False)

    async def _beat(self, line: HeartbeatLine, limit_seconds: float, *, is_spare: bool) -> None:
        reply, sent_at = await line.beat(self._held, max(limit_seconds, _SHORTEST_LIMIT_SECONDS))
        self._answered = time.monotonic()
        # The loop that started this thread may be closed by now.
        with suppress(RuntimeError):
            event = HeartbeatAnswered(reply=reply, sent_at=sent_at, is_spare=is_spare, server=line.server)
            self._starter.call_soon_threadsafe(self._put, event)
