"""A runner's heartbeat, on a thread and a connection of its own: whatever the runner's loop is busy with, leases last.

Sends what the runner holds and hands the reply back to its loop. Never decides what to do about it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from evertick.engine.extend import Extended, Held, extend
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.loop import LONGEST_BACK_OFF_SECONDS, run_loop
from evertick.store.db import Purpose


class Heartbeat:
    """Beats every `seconds`, and at once when asked. `held` and `on_reply` are called from its thread."""

    def __init__(
        self,
        *,
        url: str,
        session: int,
        seconds: float,
        held: Callable[[], list[Held]],
        on_reply: Callable[[Extended], None],
        log: Log,
    ) -> None:
        self._url, self._session, self._seconds = url, session, seconds
        self._held, self._on_reply, self._log = held, on_reply, log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
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
        link = Link(self._url, Purpose.PLANNING)

        async def beat() -> float:
            conn = await link.get()
            self._on_reply(await extend(conn, session=self._session, held=self._held()))
            return self._seconds

        # After an outage the first beat must not be later than a beat ever is.
        await run_loop(
            beat,
            wake=self._wake,
            stop=self._stop,
            name="heartbeat",
            log=self._log,
            longest_back_off=min(self._seconds, LONGEST_BACK_OFF_SECONDS),
        )
        await link.close()
