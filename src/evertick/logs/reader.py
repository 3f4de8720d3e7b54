"""Reads logs from the database, or from the object storage to which logs of ended runs are archived.

No database connection is held while the storage answers, and dedicated threads read from it: a slow or unavailable
storage delays only its own readers. A part that is missing or was changed is reported in its place; the rest is read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from uuid import UUID

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import logs
from evertick.db.queries.logs import ANY, FoundChunk, Sought
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import ResultLost, StorageUnavailable
from evertick.domain.log_archive import Piece, object_name, unpack
from evertick.runtime.thread_runner import ThreadRunner
from evertick.storage.object_store import ObjectStore, open_store

MOST_READS = 4
READ_SECONDS = 30.0
# The number of chunks searched at once (2 MB of log), and the number of rounds per request.
_ROUND, _ROUNDS = 32, 8

Lend = Callable[[], AbstractAsyncContextManager[AsyncConnection]]
_Texts = dict[tuple[UUID, int], str | None]
_LogView = Callable[..., Awaitable[list[FoundChunk]]]


class LogLines(NamedTuple):
    """Whole lines of one attempt."""

    epoch: int
    seq: int
    until: int
    is_late: bool
    content: str


class ArchivedRange(NamedTuple):
    """Adjacent pieces of an object, fetched in one request."""

    object_id: UUID
    pieces: list[Piece]


class LogArchive:
    """The archived lines. One per process."""

    def __init__(self, settings: Settings) -> None:
        self._store = open_store(settings)
        self._threads = ThreadRunner("log_archive", most=MOST_READS)

    async def filled(self, run_id: int, found: Sequence[FoundChunk]) -> list[LogLines]:
        """The same chunks with their lines. Raises StorageUnavailable."""
        spans = list(_spans(found))
        texts = await self._fetch(run_id, spans) if spans else {}
        return [LogLines(*each[:4], _content(each, texts)) for each in found]

    async def _fetch(self, run_id: int, spans: Sequence[ArchivedRange]) -> _Texts:
        if (store := self._store) is None:
            raise StorageUnavailable(
                "These lines are in an object storage, but none is configured here: set EVERTICK_STORAGE and its keys as for the"
                " scheduler."
            )
        texts = _Texts()
        try:
            async with asyncio.timeout(READ_SECONDS):
                for span in spans:
                    texts |= await self._threads.do(partial(_read, store, run_id, span))
        except TimeoutError:
            raise StorageUnavailable(f"{store.place} returned no lines within {READ_SECONDS:g} s.") from None
        return texts


@dataclass(frozen=True, slots=True)
class LogReader:
    """For one reader. `lend` lends a connection for a moment."""

    archive: LogArchive
    lend: Lend

    async def read(self, key: TaskKey, *, after: tuple[int, int], limit: int) -> list[LogLines]:
        async with self.lend() as conn:
            found = await logs.read(conn, key, epoch=after[0], seq=after[1], limit=limit)
        return await self.archive.filled(key.run_id, found)

    async def onward(self, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int) -> list[LogLines]:
        """Chunks in order, starting with the chunk that contains byte `at` (epoch, offset)."""
        return await self._look(logs.onward, key, at, sought, limit)

    async def backward(self, key: TaskKey, *, at: tuple[int, int], sought: Sought = ANY, limit: int) -> list[LogLines]:
        """Chunks in reverse order, starting with the chunk that contains byte `at`."""
        return await self._look(logs.backward, key, at, sought, limit)

    async def _look(
        self, look: _LogView, key: TaskKey, at: tuple[int, int], sought: Sought, limit: int
    ) -> list[LogLines]:
        """Archived lines can be filtered only here: read round by round until there are enough, or until so much was
        read that the client has to ask again. Fewer than the limit means that there are no more."""
        # One more than the limit: the chunk at which a round begins is read twice.
        batch = limit if sought == ANY else max(_ROUND, limit + 1)
        kept: list[LogLines] = []
        passed: list[LogLines] = []
        last: tuple[int, int] | None = None
        for _ in range(_ROUNDS):
            async with self.lend() as conn:
                epoch, seq = last or at
                found = await look(conn, key, sought, epoch=epoch, seq=seq, limit=batch)
            # The place where one round ended is where the next begins.
            fresh = [each for each in found if (each.epoch, each.seq) != last]
            filled = await self.archive.filled(key.run_id, fresh)
            kept += [each for each in filled if _fits(each.content, sought)]
            if len(kept) >= limit or len(found) < batch:
                return kept[:limit]
            passed = [each for each in filled if not _fits(each.content, sought)]
            last = (fresh[-1].epoch, fresh[-1].seq)
        # The last skipped chunks tell the client where to continue.
        kept += passed[len(kept) - limit :]
        return sorted(kept, key=lambda each: (each.epoch, each.seq), reverse=look is logs.backward)


def _fits(content: str, sought: Sought) -> bool:
    """The counterpart of the filter that the database applies to its own lines."""
    is_found = sought.text is None or sought.text.lower() in content.lower()
    return is_found and (sought.pattern is None or re.search(sought.pattern, content) is not None)


def _spans(found: Sequence[FoundChunk]) -> Iterator[ArchivedRange]:
    placed = [
        (each.object_id, Piece(each.at, each.size, each.digest))
        for each in found
        if each.object_id is not None and each.at is not None and each.size is not None and each.digest is not None
    ]
    span: ArchivedRange | None = None
    for object_id, piece in sorted(placed):
        if span is not None and span.object_id == object_id and piece.at == span.pieces[-1].at + span.pieces[-1].size:
            span.pieces.append(piece)
            continue
        if span is not None:
            yield span
        span = ArchivedRange(object_id, [piece])
    if span is not None:
        yield span


def _read(store: ObjectStore, run_id: int, span: ArchivedRange) -> _Texts:
    begin, size = span.pieces[0].at, sum(piece.size for piece in span.pieces)
    try:
        raw = store.get_part(object_name(run_id, span.object_id), at=begin, size=size)
    except ResultLost:
        return {(span.object_id, piece.at): None for piece in span.pieces}
    return {
        (span.object_id, piece.at): unpack(raw[piece.at - begin : piece.at - begin + piece.size], piece)
        for piece in span.pieces
    }


def _content(found: FoundChunk, texts: _Texts) -> str:
    if found.content is not None:
        return found.content
    assert found.object_id is not None and found.at is not None
    text = texts[(found.object_id, found.at)]
    if text is not None:
        return text
    lost = f"{found.until - found.seq} bytes of this log are missing from the storage, or were changed there."
    return f"{time.time_ns() // 1000:016} MARK {lost}\n"
