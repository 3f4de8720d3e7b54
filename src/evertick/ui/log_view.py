"""A task's log as a window: a bounded number of lines after or before a position. The client pages on from its ends.

A position is `epoch.offset.line`: the attempt, a byte offset in its log, and the number of lines to skip in that chunk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evertick.db.queries.logs import Sought
from evertick.db.queries.tasks import AttemptRow
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import UserError
from evertick.logs.format import RENDERED, Line, lines_of
from evertick.logs.reader import Chunk, LogReader
from evertick.operations.paging import like
from evertick.ui.layout import json_text

MOST_LINES = 300


MOST_CHARACTERS = 400_000


_CHUNKS = 8


_PLACE = re.compile(r"(\d{1,9})\.(\d{1,18})\.(\d{1,9})")


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")


# Levels that each filter shows. ERR is output to standard error, MARK a line written by Evertick.
LEVELS = {
    "warning": frozenset({"WARNING", "ERROR", "CRITICAL", "ERR", "MARK"}),
    "error": frozenset({"ERROR", "CRITICAL", "ERR"}),
}


class LogPosition(NamedTuple):
    epoch: int
    offset: int
    line: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.offset}.{self.line}"


START = LogPosition(0, 0, 0)


END = LogPosition(2**31 - 1, 2**63 - 1, 2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """The line filter: a minimum level and a text to search for."""

    level: str | None = None
    find: str | None = None

    @property
    def sought(self) -> Sought:
        """The database filter that every chunk with a matching line passes."""
        levels = LEVELS.get(self.level or "")
        pattern = None if levels is None else rf"(^|\n)\d{{16}} ({'|'.join(sorted(levels))}) "
        return Sought(pattern, like(self.find), self.find)

    def fits(self, line: Line) -> bool:
        levels = LEVELS.get(self.level or "")
        is_found = self.find is None or self.find.lower() in line.text.lower()
        return is_found and (levels is None or line.level in levels)


@dataclass(frozen=True, slots=True)
class Window:
    """`first` and `next` are the positions to read on before and after it; `is_start` and `is_end`: no more lines there now."""

    lines: Sequence[tuple[LogPosition, Line]]
    first: LogPosition
    next: LogPosition
    is_start: bool
    is_end: bool


def read_place(text: str | None, *, otherwise: LogPosition) -> LogPosition:
    if text is None:
        return otherwise
    found = _PLACE.fullmatch(text)
    if found is None:
        raise UserError("Invalid log position. A position looks like 1.0.0; omit it to read from the start.")
    return LogPosition(*map(int, found.groups()))


async def read_onward(reader: LogReader, key: TaskKey, place: LogPosition, sift: LogFilter) -> Window:
    chunks = await reader.onward(key, at=place[:2], sought=sift.sought, limit=_CHUNKS)
    lines: list[tuple[LogPosition, Line]] = []
    end, size = place, 0
    for at, line in _numbered(chunks):
        if at < place and _is_same_chunk(at, place):
            continue
        if len(lines) >= MOST_LINES or size >= MOST_CHARACTERS:
            return Window(lines, place, at, is_start=False, is_end=False)
        end = at._replace(line=at.line + 1)
        if sift.fits(line):
            lines.append((at, line))
            size += len(line.text)
    return Window(lines, place, end, is_start=place == START, is_end=len(chunks) < _CHUNKS)


async def read_backward(reader: LogReader, key: TaskKey, place: LogPosition, sift: LogFilter) -> Window:
    chunks = await reader.backward(key, at=place[:2], sought=sift.sought, limit=_CHUNKS)
    lines: list[tuple[LogPosition, Line]] = []
    begin, end, size = place, place, 0
    for at, line in _numbered_back(chunks):
        if at >= place:
            continue
        if end == END:
            end = at._replace(line=at.line + 1)
        if len(lines) >= MOST_LINES or size >= MOST_CHARACTERS:
            return Window(lines[::-1], begin, end, is_start=False, is_end=place == END)
        begin = at
        if sift.fits(line):
            lines.append((at, line))
            size += len(line.text)
    if end == END:
        end = START
    return Window(lines[::-1], begin, end, is_start=len(chunks) < _CHUNKS, is_end=place == END)


def _is_same_chunk(at: LogPosition, place: LogPosition) -> bool:
    return at.epoch == place.epoch and at.offset == place.offset


def _numbered(chunks: Sequence[Chunk]) -> Iterator[tuple[LogPosition, Line]]:
    for chunk in chunks:
        lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
        for number, line in enumerate(lines):
            yield LogPosition(chunk.epoch, chunk.seq, number), line


def _numbered_back(chunks: Sequence[Chunk]) -> Iterator[tuple[LogPosition, Line]]:
    for chunk in chunks:
        lines = list(lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late))
        for number in range(len(lines) - 1, -1, -1):
            yield LogPosition(chunk.epoch, chunk.seq, number), lines[number]


def plain(text: str) -> str:
    """Remove terminal colours, for browsers without scripts."""
    return _ANSI.sub("", text)


_MOST_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Rendered:
    """The rendered fields of one attempt, each as text."""

    attempt: int
    fields: Sequence[tuple[str, str]]


async def rendered_of(reader: LogReader, key: TaskKey, attempts: Sequence[AttemptRow]) -> list[Rendered]:
    """The rendered fields, newest attempt first, without attempts that have none."""
    found = []
    for each in attempts[: -_MOST_ATTEMPTS - 1 : -1]:
        for chunk in await reader.onward(key, at=(each.epoch, 0), limit=1):
            if chunk.epoch == each.epoch and (fields := fields_in(chunk.content)):
                found.append(Rendered(each.attempt, fields))
    return found


def fields_in(content: str) -> list[tuple[str, str]]:
    told = [line.text.partition(" = ") for line in lines_of(content, epoch=0, is_late=False) if line.level == RENDERED]
    return [(name, _shown(text)) for name, _, text in told]


def _shown(text: str) -> str:
    """Return text unchanged and other values as formatted JSON, also if the log truncated the value."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else json_text(value)
