"""Ships log lines to the database while attempts run, and orphaned logs of dead runners. Never delays a task: while the
database is unreachable the lines wait in their spool files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from psycopg import AsyncConnection

from evertick.domain.attempt import Outcome
from evertick.execution.leftovers import discard, leftovers
from evertick.execution.spool import LogChunk
from evertick.services.events import Log
from evertick.services.link import Link
from evertick.services.loop import run_loop
from evertick.services.pulse import Pulse
from evertick.store import logs, runners
from evertick.store.db import Purpose
from evertick.store.logs import NewChunk

CHUNKS_PER_STATEMENT = 50
LOG_SECONDS = 0.2
IDLE_SECONDS = 60.0


class LogService:
    """A runner's logs, on their own connections. `is_busy` while attempts run; `wake` when that changes."""

    def __init__(self, url: str, *, spool: Path, session: int, poll: Callable[[], list[LogChunk]], log: Log) -> None:
        self._url, self._spool, self._session, self._poll, self._log = url, spool, session, poll, log
        self._unsent: list[LogChunk] = []
        self.is_busy = False
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Ship the lines of running attempts, until canceled."""
        link = Link(self._url, Purpose.PLANNING)
        try:
            await run_loop(
                lambda: self._ship_new(link),
                wake=self.wake,
                stop=asyncio.Event(),
                name="logs",
                log=self._log,
                pulse=Pulse("logs", is_essential=False),
            )
        finally:
            await link.close()

    async def run_late(self) -> None:
        """Ship the logs that dead runners left, once. Not before the first claim: they may be gigabytes."""
        link, is_over = Link(self._url, Purpose.PLANNING), asyncio.Event()

        async def ship_late() -> float:
            await ship_leftovers(await link.get(), spool=self._spool, session=self._session, log=self._log)
            is_over.set()
            return 0.0

        try:
            await run_loop(
                ship_late,
                wake=asyncio.Event(),
                stop=is_over,
                name="late_logs",
                log=self._log,
                pulse=Pulse("late_logs", is_essential=False),
            )
        finally:
            await link.close()

    async def _ship_new(self, link: Link) -> float:
        # Polling again tells the executor that the previous chunks are stored, so send those first.
        if not self._unsent:
            self._unsent = self._poll()
        if not self._unsent:
            return LOG_SECONDS if self.is_busy else IDLE_SECONDS
        await ship(await link.get(), session=self._session, chunks=self._unsent)
        self._unsent = []
        return LOG_SECONDS


def stored(chunk: LogChunk) -> NewChunk:
    text = chunk.content.decode("utf-8", "replace")
    return NewChunk(key=chunk.key, epoch=chunk.epoch, seq=chunk.offset, until=chunk.end, content=text)


def last_lines(outcome: Outcome) -> LogChunk:
    """The last lines of an attempt's log, which its outcome carries."""
    return LogChunk(
        key=outcome.key,
        epoch=outcome.epoch,
        offset=outcome.log_offset,
        end=outcome.log_end,
        content=outcome.log,
    )


async def ship(conn: AsyncConnection, *, session: int, chunks: list[LogChunk]) -> None:
    for first in range(0, len(chunks), CHUNKS_PER_STATEMENT):
        batch = [stored(chunk) for chunk in chunks[first : first + CHUNKS_PER_STATEMENT]]
        await logs.append(conn, session=session, chunks=batch)


async def ship_leftovers(conn: AsyncConnection, *, spool: Path, session: int, log: Log) -> None:
    """Lines of dead sessions are stored late and marked as late; then their files are deleted."""
    live = {runner.session for runner in await runners.live(conn)} | {session}
    shipped: dict[Path, int] = {}
    for left in leftovers(spool, live):
        until = await logs.shipped_until(conn, left.key, epoch=left.epoch)
        await ship(conn, session=left.session, chunks=list(left.chunks(shipped_until=until)))
        shipped[left.path] = shipped.get(left.path, 0) + 1
    for path in shipped:
        discard(path)
    if shipped:
        log.info("late_logs", files=len(shipped), attempts=sum(shipped.values()))
