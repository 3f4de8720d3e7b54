"""The log of a task: page by page, or followed until the task has ended. The merged log of a run: page by page.

Lines of one attempt arrive on two ways, at its end and before it, and may be stored in either order. Lines of a lost attempt
arrive when the next one has already begun. So a reader continues from the end of what it has of each attempt, and waits for
a moment where something is missing in between.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heapify, heappop, heappush
from typing import Annotated, ClassVar, cast

from annotated_doc import Doc
from annotated_types import MaxLen
from psycopg import AsyncConnection

from evertick.db.queries import logs, tasks
from evertick.db.queries.logs import FoundChunk, OrderedAttempt
from evertick.db.queries.shards import read_clock
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import StorageUnavailable, UserError
from evertick.domain.states import TERMINAL_RUN_STATES, TERMINAL_TASK_STATES, TaskState
from evertick.logs.format import Line, lines_of
from evertick.logs.reader import LogLines
from evertick.operations.caller import Caller, is_still_valid
from evertick.operations.paging import Cursor, Page, encode_cursor, read_cursor, record_of
from evertick.operations.runs import RunId, find_run
from evertick.operations.tasks import MapIndex, TaskName, find_task, small

POLL_SECONDS, CHECK_SECONDS, HEARTBEAT_SECONDS = 0.3, 5.0, 15.0
# By then, all lines from before the end of the task are stored; missing ones never arrive.
QUIET_SECONDS, HOLE_SECONDS = 1.0, 5.0
CHUNKS_PER_PAGE = 50
_CHUNKS_PER_POLL = 20
_MOST_EPOCHS = 50
_PLACE = re.compile(r"(\d{1,9})\.(\d{1,18})\.(\d{1,18})")

LONGEST_PLACE = 2000

# Levels that are shown by another name.
LEVEL_WORDS = {"OUT": "stdout", "ERR": "stderr", "RAW": "output", "RENDER": "template", "MARK": "evertick"}
_BUNDLE_PATH = re.compile(r'(?<=File ")/[^"\n]{0,500}/[0-9a-f]{64}/')


def with_short_paths(text: str) -> str:
    """A line of a traceback without the folder of the bundle, which is longer than what people look for."""
    return _BUNDLE_PATH.sub("", text)


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
        found = await logs.news(
            conn,
            key,
            epochs=list(known),
            seqs=list(known.values()),
            newest=max(known, default=0),
            limit=_CHUNKS_PER_POLL,
        )
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

    def take(self, chunk: LogLines) -> None:
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


def _new_lines(chunk: LogLines, places: Places) -> NewLines:
    lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
    new = [NewLine(at=line.at, level=line.level, text=line.text) for line in lines]
    return record_of(NewLines, chunk, id=str(places), lines=new)


# The log of a run -----------------------------------------------------------------------------------------------------

# The attempts whose lines are merged at once. Of more that overlap, the later ones follow when an earlier one has ended.
MOST_OPEN = 50
_CHUNKS_PER_RUN_PAGE, _LINES_PER_RUN_PAGE = 128, 1000
_AT_END = 10**17
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OPENED = re.compile(r"(\d{1,9})\.(-?\d{1,9})\.(\d{1,9})\.(\d{1,18})\.(\d{1,9})")

RunLogCursor = Annotated[
    str | None, MaxLen(8000), Doc("`next_cursor` of the previous page. Leave it out for the first page.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLogLine(LogLine):
    """A line with its task. The name of an instance of a mapped task has its index: `score[3]`."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLogPage:
    """Lines of the tasks of a run, by time. `next_cursor` is always set: new lines of an open run follow there.
    `is_complete`: the run has ended, and these are its last lines."""

    lines: list[RunLogLine]
    next_cursor: str
    is_complete: bool


@dataclass(slots=True)
class _OpenLog:
    """The log of one attempt: the last chunk that was read, how many of its lines, and the lines that come next."""

    attempt: OrderedAttempt
    seq: int = 0
    line: int = 0
    next_lines: deque[tuple[int, int, Line]] = field(default_factory=deque)
    is_cut: bool = False

    def add(self, chunk: LogLines) -> None:
        lines = enumerate(lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late), 1)
        self.next_lines += [(chunk.seq, n, line) for n, line in lines if (chunk.seq, n) > (self.seq, self.line)]

    def add_end(self) -> None:
        """The reason why the attempt failed, as its last line."""
        attempt = self.attempt
        if attempt.reason and attempt.outcome != TaskState.SUCCESS and self.seq < _AT_END:
            text = f"{attempt.outcome}: {attempt.reason}"
            line = Line(attempt.epoch, attempt.finished_at, "MARK", text, is_late=False)
            self.next_lines.append((_AT_END, 1, line))

    @property
    def next_at(self) -> datetime:
        return max(self.next_lines[0][2].at or self.attempt.started_at, self.attempt.started_at)

    def take(self) -> RunLogLine:
        self.seq, self.line, line = self.next_lines.popleft()
        index = f"[{self.attempt.map_index}]" if self.attempt.map_index >= 0 else ""
        return RunLogLine(task=self.attempt.task + index, **line._asdict())

    def has_ended(self, before: datetime) -> bool:
        return self.attempt.finished_at is not None and self.attempt.finished_at <= before


@dataclass(slots=True)
class _RunPlace:
    """Where a page ends: the attempt that was opened last, as its start and its key, and the place in each open one."""

    last: tuple[int, int, int, int] = (0, -1, -2, -1)
    opened: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, cursor: str | None) -> _RunPlace:
        if cursor is None:
            return cls()
        micros, idx, map_index, epoch, text = cast(
            "tuple[int, int, int, int, str]", read_cursor(cursor, *cls().last, "")
        )
        found = [_OPENED.fullmatch(part) for part in text.split(",")] if text else []
        if not all(found) or len(found) > MOST_OPEN:
            raise UserError("This cursor is invalid. Repeat the request without a cursor.")
        numbers = [[int(number) for number in each.groups()] for each in found if each]
        opened = {(idx, map_index, epoch): (seq, line) for idx, map_index, epoch, seq, line in numbers}
        return cls((min(max(micros, 0), 10**17), small(idx), small(map_index), small(epoch)), opened)

    def __str__(self) -> str:
        opened = ",".join(".".join(map(str, (*key, *place))) for key, place in self.opened.items())
        return encode_cursor(*self.last, opened)

    async def attempts(self, conn: AsyncConnection, run_id: int) -> list[OrderedAttempt]:
        """The open ones and the next ones: one more than can be open."""
        micros, idx, map_index, epoch = self.last
        started_at = _EPOCH + timedelta(microseconds=micros)
        place = logs.AttemptPlace(started_at, idx, map_index, epoch)
        opened = logs.OpenAttempts.of([(*key, 0) for key in self.opened])
        return await logs.attempts_in_order(conn, opened, place, run_id=run_id, limit=MOST_OPEN + 1)


async def read_run_log(caller: Caller, *, run_id: RunId, cursor: RunLogCursor = None) -> RunLogPage:
    """Read the lines of all tasks of a run, merged by time. While the run is open, request `next_cursor` again."""
    place = _RunPlace.read(cursor)
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        now = await read_clock(conn)
        *attempts, further = [*await place.attempts(conn, run_id), None]
        if len(attempts) > MOST_OPEN:
            further = attempts.pop()
        open_logs = [_OpenLog(each, *place.opened.get(each[:3], (0, 0))) for each in attempts]
        most = _CHUNKS_PER_RUN_PAGE // max(len(attempts), 1)
        asked = logs.OpenAttempts.of([(*each.attempt[:3], each.seq) for each in open_logs])
        found = await logs.of_attempts(conn, asked, run_id=run_id, chunks=most)
    chunks = await caller.context.log_archive.filled(run_id, [chunk for _, chunk in found])
    counts = Counter(number for number, _ in found)
    for (number, _), chunk in zip(found, chunks, strict=True):
        open_logs[number].add(chunk)
        open_logs[number].is_cut = counts[number] == most
    # Lines from before the end of an attempt may arrive for a moment, unless another attempt needs its place.
    ended_before = now - timedelta(seconds=QUIET_SECONDS if further is None else 0)
    for each in open_logs:
        if each.has_ended(ended_before) and not each.is_cut:
            each.add_end()
    lines = _merge(open_logs, further)
    left = [each for each in open_logs if each.next_lines or each.is_cut or not each.has_ended(ended_before)]
    place.opened = {each.attempt[:3]: (each.seq, each.line) for each in left}
    if attempts:
        last = max(attempts, key=lambda each: (each.started_at, each[:3]))
        place.last = ((last.started_at - _EPOCH) // timedelta(microseconds=1), *last[:3])
    is_complete = run.state in TERMINAL_RUN_STATES and not left and further is None
    return RunLogPage(lines=lines, next_cursor=str(place), is_complete=is_complete)


def _merge(open_logs: Sequence[_OpenLog], further: OrderedAttempt | None) -> list[RunLogLine]:
    """The next lines by time: until a page is full, or until the next line may be one that was not fetched."""
    lines: list[RunLogLine] = []
    heap = [(each.next_at, number) for number, each in enumerate(open_logs) if each.next_lines]
    heapify(heap)
    while heap and len(lines) < _LINES_PER_RUN_PAGE:
        at, number = heappop(heap)
        has_room = any(each.attempt.finished_at and not each.next_lines and not each.is_cut for each in open_logs)
        if further is not None and at >= further.started_at and has_room:
            break
        lines.append(open_logs[number].take())
        if open_logs[number].next_lines:
            heappush(heap, (max(at, open_logs[number].next_at), number))
        elif open_logs[number].is_cut:
            break
    return lines
