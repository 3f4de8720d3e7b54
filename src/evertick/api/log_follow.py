"""Follows a task's log as server-sent events until the task ends. Each event id contains the read position of each attempt.

Log chunks of one attempt are stored through two paths (by the shipper and with the outcome) in either order, and chunks of a lost
attempt may arrive after the next one has started. So the reader continues from its position in each attempt, and waits a while
for missing chunks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from psycopg import AsyncConnection

from evertick.api.context import Caller
from evertick.api.event_hub import HEARTBEAT_SECONDS, event, heartbeat
from evertick.db.queries import logs, tasks
from evertick.db.queries.logs import FoundChunk
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import StorageUnavailable, UserError
from evertick.domain.states import TERMINAL_TASK_STATES
from evertick.engine.accounts import still_valid
from evertick.logs.format import Line, lines_of
from evertick.logs.reader import Chunk

LOOK_SECONDS, CHECK_SECONDS = 0.3, 5.0
# Seconds to wait for a missing chunk. Chunks still missing after that never arrive.
QUIET_SECONDS, HOLE_SECONDS = 1.0, 5.0
_CHUNKS = 20
_MOST_EPOCHS = 50
_PLACE = re.compile(r"(\d{1,9})\.(\d{1,18})\.(\d{1,18})")


@dataclass(slots=True)
class Places:
    """Read positions: for each attempt, start and end of the last chunk that was read."""

    of_epoch: dict[int, tuple[int, int]] = field(default_factory=dict)
    _hole_since: float | None = None

    @classmethod
    def read(cls, text: str | None) -> Places:
        if text in (None, "", "0"):
            return cls()
        found = [_PLACE.fullmatch(part) for part in text.split(",")] if text else []
        if not all(found) or len(found) > _MOST_EPOCHS:
            raise UserError("Invalid Last-Event-ID. Omit it to start from the beginning.")
        numbers = [[int(number) for number in each.groups()] for each in found if each]
        return cls({epoch: (seq, until) for epoch, seq, until in numbers})

    def __str__(self) -> str:
        newest = sorted(self.of_epoch.items())[-_MOST_EPOCHS:]
        return ",".join(f"{epoch}.{seq}.{until}" for epoch, (seq, until) in newest) or "0"

    async def next_chunks(self, conn: AsyncConnection, key: TaskKey) -> list[FoundChunk]:
        """The next chunks, up to a missing chunk that may still arrive."""
        known = {epoch: seq for epoch, (seq, _) in self.of_epoch.items()}
        found = await logs.news(conn, key, known=known, limit=_CHUNKS)
        is_patient = self._hole_since is None or time.monotonic() - self._hole_since < HOLE_SECONDS
        ends = {epoch: end for epoch, (_, end) in self.of_epoch.items()}
        for number, chunk in enumerate(found):
            end = ends.get(chunk.epoch, 0)
            if chunk.seq > end and is_patient:
                self._hole_since = self._hole_since or time.monotonic()
                return found[:number]
            ends[chunk.epoch] = max(chunk.until, end)
        self._hole_since = None
        return found

    def take(self, chunk: Chunk) -> None:
        _, end = self.of_epoch.get(chunk.epoch, (0, 0))
        self.of_epoch[chunk.epoch] = (chunk.seq, max(chunk.until, end))

    @property
    def is_waiting(self) -> bool:
        """Whether a chunk is missing."""
        return self._hole_since is not None


@dataclass(frozen=True, slots=True)
class End:
    """The end of the stream: the task has ended with `state` (None: it was deleted), or the reason why the stream stops."""

    state: str | None = None
    reason: str | None = None


async def follow(caller: Caller, key: TaskKey, places: Places) -> AsyncGenerator[str, None]:
    """As events."""
    async with aclosing(_news(caller, key, places)) as news:
        async for each in news:
            match each:
                case End(reason=None):
                    yield event("end", {"state": each.state}, id=str(places))
                case End():
                    yield event("end", {"reason": each.reason}, id=str(places))
                case None:
                    yield heartbeat(id=str(places))
                case _:
                    yield event("lines", _lines(each), id=str(places))


async def follow_text(caller: Caller, key: TaskKey) -> AsyncGenerator[str, None]:
    """Follow the log as plain text, from the beginning."""
    async with aclosing(_news(caller, key, Places())) as news:
        async for each in news:
            match each:
                case None | End(reason=None):
                    pass
                case End():
                    yield mark_text(f"The log ends here: {each.reason}")
                case _:
                    yield chunk_text(each)


def chunk_text(chunk: Chunk) -> str:
    lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
    return "".join(map(_line_text, lines))


def mark_text(text: str) -> str:
    return _line_text(Line(0, None, "MARK", text, False))


def _line_text(line: Line) -> str:
    at = line.at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if line.at else "-"
    return f"{at} {line.level} {line.text}{' (late)' if line.is_late else ''}\n"


async def _news(caller: Caller, key: TaskKey, places: Places) -> AsyncGenerator[Chunk | End | None, None]:
    """Yield chunks until the task has ended and its log is complete; None as a keep-alive. Holds no connection while the client
    reads."""
    moved_at = checked_at = spoke_at = time.monotonic()
    while not caller.desk.hub.is_over:
        is_due = time.monotonic() - checked_at >= CHECK_SECONDS
        async with caller.reading() as conn:
            is_refused = is_due and not await is_still_valid(caller, conn)
            row = await tasks.find(conn, key)
            found = await places.next_chunks(conn, key)
        if is_refused:
            yield End(reason="signed out, or other rights: sign in again")
            return
        now = time.monotonic()
        checked_at = now if is_due else checked_at
        try:
            chunks = await caller.desk.log_archive.filled(key.run_id, found)
        except StorageUnavailable as error:
            yield End(reason=str(error))
            return
        for chunk in chunks:
            places.take(chunk)
            yield chunk
        if found:
            moved_at = spoke_at = now
            if len(found) == _CHUNKS:
                continue
        is_over = row is None or row.state in TERMINAL_TASK_STATES
        if is_over and not places.is_waiting and now - moved_at >= QUIET_SECONDS:
            yield End(state=row.state if row else None)
            return
        if now - spoke_at >= HEARTBEAT_SECONDS:
            spoke_at = now
            yield None
        await asyncio.sleep(LOOK_SECONDS)


async def is_still_valid(caller: Caller, conn: AsyncConnection) -> bool:
    """Whether the caller's session is still valid with the same permissions."""
    credential_id = caller.principal.credential_id
    return credential_id is None or await still_valid(conn, [credential_id]) == [caller.principal]


def _lines(chunk: Chunk) -> dict[str, object]:
    lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
    told = [
        {"at": line.at and line.at.isoformat().replace("+00:00", "Z"), "level": line.level, "text": line.text}
        for line in lines
    ]
    return {"epoch": chunk.epoch, "is_late": chunk.is_late, "lines": told}
