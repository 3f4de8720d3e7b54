"""The log of a task: page by page, or followed until the task has ended.

Lines of one attempt arrive on two ways, at its end and before it, and may be stored in either order. Lines of a lost attempt
arrive when the next one has already begun. So a reader continues from the end of what it has of each attempt, and waits for
a moment where something is missing in between.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, ClassVar

from annotated_doc import Doc
from annotated_types import MaxLen
from psycopg import AsyncConnection

from evertick.db.queries import logs, tasks
from evertick.db.queries.logs import FoundChunk
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import StorageUnavailable, UserError
from evertick.domain.states import TERMINAL_TASK_STATES
from evertick.logs.format import lines_of
from evertick.logs.reader import Chunk
from evertick.operations.caller import Caller, is_still_valid
from evertick.operations.paging import Cursor, Page, encode_cursor, read_cursor
from evertick.operations.runs import RunId
from evertick.operations.tasks import MapIndex, TaskName, find_task, small

POLL_SECONDS, CHECK_SECONDS, HEARTBEAT_SECONDS = 0.3, 5.0, 15.0
# By then, all lines from before the end of the task are stored; missing ones never arrive.
QUIET_SECONDS, HOLE_SECONDS = 1.0, 5.0
CHUNKS_PER_PAGE = 50
_CHUNKS_PER_POLL = 20
_MOST_EPOCHS = 50
_PLACE = re.compile(r"(\d{1,9})\.(\d{1,18})\.(\d{1,18})")

LONGEST_PLACE = 2000
After = Annotated[str | None, MaxLen(LONGEST_PLACE), Doc("With `follow`: continue after the event with this id.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of one attempt. `is_late`: it arrived after the attempt had ended."""

    epoch: int
    at: datetime | None
    level: str
    text: str
    is_late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    at: datetime | None
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLines:
    """Lines of one attempt. With the `id` of an event a reader can continue after it."""

    event: ClassVar[str] = "lines"
    is_last: ClassVar[bool] = False

    id: str
    epoch: int
    is_late: bool
    lines: list[NewLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """The task has ended with this state (None: it no longer exists), or `reason` says why the rest cannot be read."""

    event: ClassVar[str] = "end"
    is_last: ClassVar[bool] = True

    id: str
    state: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeartbeat:
    """Nothing was written for a while."""

    event: ClassVar[str] = "heartbeat"
    is_last: ClassVar[bool] = False

    id: str


@dataclass(slots=True)
class Places:
    """For each attempt the start of the last chunk that was read, and its end."""

    of_epoch: dict[int, tuple[int, int]] = field(default_factory=dict)
    _hole_since: float | None = None

    @classmethod
    def read(cls, text: str | None) -> Places:
        if text in (None, "", "0"):
            return cls()
        found = [_PLACE.fullmatch(part) for part in text.split(",")] if text else []
        if not all(found) or len(found) > _MOST_EPOCHS:
            raise UserError("This is not the id of an event of a log. Start without an id.")
        numbers = [[int(number) for number in each.groups()] for each in found if each]
        return cls({epoch: (seq, until) for epoch, seq, until in numbers})

    def __str__(self) -> str:
        newest = sorted(self.of_epoch.items())[-_MOST_EPOCHS:]
        return ",".join(f"{epoch}.{seq}.{until}" for epoch, (seq, until) in newest) or "0"

    async def next_chunks(self, conn: AsyncConnection, key: TaskKey) -> list[FoundChunk]:
        """The next chunks, up to where something is missing that may still arrive."""
        known = {epoch: seq for epoch, (seq, _) in self.of_epoch.items()}
        found = await logs.news(conn, key, known=known, limit=_CHUNKS_PER_POLL)
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
        """Whether something is missing."""
        return self._hole_since is not None


async def read_log(
    caller: Caller, *, run_id: RunId, task: TaskName, map_index: MapIndex = -1, cursor: Cursor = None
) -> Page[LogLine]:
    """Read the lines of a task. While the task runs, the last page grows: request it again.

    With `follow` the response is a stream of server-sent events until the task has ended.
    """
    epoch, seq = read_cursor(cursor, 0, -1)
    async with caller.read() as conn:
        _, key = await find_task(caller, conn, run_id, task, map_index)
    found = await caller.log_reader.read(key, after=(small(epoch), seq), limit=CHUNKS_PER_PAGE)
    lines = [line for chunk in found for line in lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)]
    next_cursor = encode_cursor(found[-1].epoch, found[-1].seq) if len(found) == CHUNKS_PER_PAGE else None
    return Page(items=[LogLine(**line._asdict()) for line in lines], next_cursor=next_cursor)


async def follow_log(
    caller: Caller, *, run_id: RunId, task: TaskName, map_index: MapIndex = -1, after: After = None
) -> AsyncGenerator[NewLines | LogEnd | LogHeartbeat, None]:
    """Follow the log of a task until the task has ended."""
    places = Places.read(after)
    async with caller.read() as conn:
        _, key = await find_task(caller, conn, run_id, task, map_index)
    return _follow(caller, key, places)


async def _follow(
    caller: Caller, key: TaskKey, places: Places
) -> AsyncGenerator[NewLines | LogEnd | LogHeartbeat, None]:
    """Until the task has ended and all that it wrote was read. No connection is held while the reader works."""
    moved_at = checked_at = spoke_at = time.monotonic()
    while not caller.context.is_stopping:
        is_due = time.monotonic() - checked_at >= CHECK_SECONDS
        async with caller.read() as conn:
            is_refused = is_due and not await is_still_valid(caller, conn)
            row = await tasks.find(conn, key)
            found = await places.next_chunks(conn, key)
        if is_refused:
            yield LogEnd(id=str(places), reason="signed out, or other rights: sign in again")
            return
        now = time.monotonic()
        checked_at = now if is_due else checked_at
        try:
            chunks = await caller.context.log_archive.filled(key.run_id, found)
        except StorageUnavailable as error:
            yield LogEnd(id=str(places), reason=str(error))
            return
        for chunk in chunks:
            places.take(chunk)
            yield _new_lines(chunk, places)
        if found:
            moved_at = spoke_at = now
            if len(found) == _CHUNKS_PER_POLL:
                continue
        is_over = row is None or row.state in TERMINAL_TASK_STATES
        if is_over and not places.is_waiting and now - moved_at >= QUIET_SECONDS:
            yield LogEnd(id=str(places), state=row.state if row else None)
            return
        if now - spoke_at >= HEARTBEAT_SECONDS:
            spoke_at = now
            yield LogHeartbeat(id=str(places))
        await asyncio.sleep(POLL_SECONDS)


def _new_lines(chunk: Chunk, places: Places) -> NewLines:
    lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
    return NewLines(
        id=str(places),
        epoch=chunk.epoch,
        is_late=chunk.is_late,
        lines=[NewLine(at=line.at, level=line.level, text=line.text) for line in lines],
    )
