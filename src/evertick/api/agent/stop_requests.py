"""Notifies waiting heartbeats when their attempt must stop: one query a second for all of them, none if no heartbeat waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psycopg

from evertick.db.queries import runners
from evertick.domain.errors import PostgresUnavailable
from evertick.runtime.pool import Pool

LOOK_SECONDS = 1.0


class StopRequests:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[int, asyncio.Event] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def wait(self, session: int, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether the attempt was requested to stop or lost its lease."""
        told = self._waiting[session] = asyncio.Event()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), seconds)
        finally:
            # A newer request of the same agent may have replaced the entry.
            if self._waiting.get(session) is told:
                del self._waiting[session]
        return told.is_set()

    def close(self) -> None:
        """Release all waiting heartbeats, because the server shuts down."""
        for told in self._waiting.values():
            told.set()

    async def _look(self) -> None:
        while self._waiting:
            # Retried by the next query; heartbeats also time out on their own.
            with suppress(psycopg.Error, PostgresUnavailable, OSError):
                async with self._pool.lent() as conn:
                    found = await runners.disturbed(conn, list(self._waiting))
                for session in found & self._waiting.keys():
                    self._waiting[session].set()
            await asyncio.sleep(LOOK_SECONDS)
