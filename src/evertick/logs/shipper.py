"""Ships log lines from the spool to the database while attempts run, and the orphaned logs of dead runners, late.

Never touches the spool of another live session.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from evertick.db.connect import Purpose
from evertick.db.queries import logs, runners
from evertick.db.queries.logs import NewChunk
from evertick.domain.attempt import Outcome, TaskKey, session_text
from evertick.logs import format
from evertick.logs.spool import WINDOW_BYTES, AttemptLog, LogCap, LogChunk
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop

_LONGEST_HEADER_BYTES = 128
_EMPTY_SECONDS = 3600.0
_SESSION_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedLog:
    """The log of an attempt whose runner died before it could ship everything."""

    key: TaskKey
    epoch: int
    session: int
    path: Path
    start: int
    end: int

    def chunks(self, shipped_until: int = 0, cap: LogCap | None = None) -> Iterator[LogChunk]:
        """The chunks that are not stored yet; `shipped_until` is the largest `end` that is."""
        with self.path.open("rb") as file:
            log = AttemptLog(file.fileno(), self.start, cap or LogCap(), shipped_until=shipped_until)
            log.close(self.end)
            while log.pending_bytes > 0:
                offset = log.offset
                if content := log.next_lines():
                    yield LogChunk(key=self.key, epoch=self.epoch, offset=offset, end=log.offset, content=content)


def orphaned_logs(spool_dir: Path, live_sessions: set[int]) -> Iterator[OrphanedLog]:
    """The logs of sessions that are no longer alive. Ship each, then `discard` its file."""
    live = {session_text(session) for session in live_sessions}
    if not spool_dir.is_dir():
        return
    for folder in sorted(spool_dir.iterdir()):
        if folder.name in live or not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            found = list(_attempts_in(path)) if path.suffix == ".log" else []
            if not found:
                discard(path)
            yield from found
        # A runner that was killed may leave an empty one. A young one may belong to a runner that is about to register.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _EMPTY_SECONDS:
                folder.rmdir()


def sessions_in(spool_dir: Path) -> set[int]:
    """The sessions that have a folder here."""
    names = [folder.name for folder in spool_dir.iterdir()] if spool_dir.is_dir() else []
    return {int(name, 16) for name in names if len(name) == _SESSION_DIGITS and set(name) <= set("0123456789abcdef")}


def discard(path: Path) -> None:
    """Remove an orphaned log's file, and its session's folder when that was the last."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


def _attempts_in(path: Path) -> Iterator[OrphanedLog]:
    with suppress(OSError):
        with path.open("rb") as file:
            headers = list(_headers_in(file.fileno()))
            ends = [start for start, _ in headers[1:]] + [os.fstat(file.fileno()).st_size]
        for (start, found), end in zip(headers, ends, strict=False):
            yield OrphanedLog(key=found.key, epoch=found.epoch, session=found.session, path=path, start=start, end=end)


def _headers_in(fd: int) -> Iterator[tuple[int, format.Header]]:
    """Every header of a file, skipping punched holes. Windows overlap, so that no header is cut in two."""
    at, searched_to, end = 0, 0, os.fstat(fd).st_size
    while searched_to < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        window = os.pread(fd, WINDOW_BYTES, at)
        for place, found in format.find_headers(window):
            if at + place >= searched_to:
                yield at + place, found
                searched_to = at + place + 1
        searched_to = max(searched_to, at + len(window) - _LONGEST_HEADER_BYTES)
        if at + len(window) >= end:
            return
        at = searched_to


CHUNKS_PER_STATEMENT = 50


LOG_SECONDS = 0.2


IDLE_SECONDS = 60.0


class LogStore(Protocol):
    """Where a runner ships log lines: the database, or the API."""

    async def append(self, session: int, chunks: list[LogChunk]) -> None:
        """Store lines of attempts of that session. Repeating it is harmless."""

    async def shipped_until(self, session: int, key: TaskKey, epoch: int) -> int:
        """The end of what is stored of an attempt of that session."""

    async def live_sessions(self, sessions: set[int]) -> set[int]:
        """Those of these sessions that may still ship their own logs."""

    async def close(self) -> None: ...


class DatabaseLogStore:
    """On a connection of its own."""

    def __init__(self, url: str) -> None:
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)

    async def append(self, session: int, chunks: list[LogChunk]) -> None:
        await logs.append(await self._link.get(), session=session, chunks=[stored(chunk) for chunk in chunks])

    async def shipped_until(self, session: int, key: TaskKey, epoch: int) -> int:
        return await logs.shipped_until(await self._link.get(), key, epoch=epoch)

    async def live_sessions(self, sessions: set[int]) -> set[int]:
        return {runner.session for runner in await runners.live(await self._link.get())} & sessions

    async def close(self) -> None:
        await self._link.close()


class LogShipper:
    """A runner's logs. `open_store` opens a store of their own for the lines of running attempts, and one for what dead
    runners left: neither waits for the other."""

    def __init__(
        self,
        open_store: Callable[[], LogStore],
        *,
        spool: Path,
        session: int,
        poll: Callable[[], list[LogChunk]],
        log: Log,
    ) -> None:
        self._open, self._spool, self._session, self._poll, self._log = open_store, spool, session, poll, log
        self._unsent: list[LogChunk] = []
        self._is_busy = False
        self._wake = asyncio.Event()

    def set_busy(self, is_busy: bool) -> None:
        """Lines are shipped every few hundred milliseconds while attempts run."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._wake.set()

    async def run(self) -> None:
        """Ship the lines of running attempts, until canceled."""
        store = self._open()
        try:
            ship_new = partial(self._ship_new, store)
            await run_loop(ship_new, wake=self._wake, name="logs", log=self._log, is_essential=False)
        finally:
            await store.close()

    async def run_late(self) -> None:
        """Ship the logs that dead runners left, once. Not before the first claim: they may be gigabytes."""
        store, is_over = self._open(), asyncio.Event()

        async def ship_late() -> float:
            await ship_orphaned_logs(store, spool=self._spool, session=self._session, log=self._log)
            is_over.set()
            return 0.0

        try:
            await run_loop(ship_late, stop=is_over, name="late_logs", log=self._log, is_essential=False)
        finally:
            await store.close()

    async def _ship_new(self, store: LogStore) -> float:
        # Polling again tells the executor that the previous chunks are stored, so send those first.
        if not self._unsent:
            self._unsent = self._poll()
        if not self._unsent:
            return LOG_SECONDS if self._is_busy else IDLE_SECONDS
        await ship(store, session=self._session, chunks=self._unsent)
        self._unsent = []
        return LOG_SECONDS


def stored(chunk: LogChunk) -> NewChunk:
    text = chunk.content.decode("utf-8", "replace")
    return NewChunk(key=chunk.key, epoch=chunk.epoch, seq=chunk.offset, until=chunk.end, content=text)


def last_lines(outcome: Outcome) -> LogChunk:
    """The last lines of an attempt's log, which its outcome carries."""
    at, end = outcome.log_offset, outcome.log_end
    return LogChunk(key=outcome.key, epoch=outcome.epoch, offset=at, end=end, content=outcome.log)


async def ship(store: LogStore, *, session: int, chunks: list[LogChunk]) -> None:
    for first in range(0, len(chunks), CHUNKS_PER_STATEMENT):
        await store.append(session, chunks[first : first + CHUNKS_PER_STATEMENT])


async def ship_orphaned_logs(store: LogStore, *, spool: Path, session: int, log: Log) -> None:
    """Lines of dead sessions are stored late and marked as late; then their files are deleted."""
    live = await store.live_sessions(sessions_in(spool)) | {session}
    shipped: dict[Path, int] = {}
    for left in orphaned_logs(spool, live):
        until = await store.shipped_until(left.session, left.key, left.epoch)
        await ship(store, session=left.session, chunks=list(left.chunks(shipped_until=until)))
        shipped[left.path] = shipped.get(left.path, 0) + 1
    for path in shipped:
        discard(path)
    if shipped:
        log.info("orphaned_logs_shipped", files=len(shipped), attempts=sum(shipped.values()))
