"""A task's log as a window: a bounded number of lines after or before a position. The client pages on from its ends.

A position is `epoch.offset.line`: the attempt, a byte offset in its log, and the number of lines to skip in that chunk.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evertick.db.queries.logs import ANY, Sought
from evertick.db.queries.tasks import AttemptRow
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import UserError
from evertick.logs.format import RENDERED, Line, lines_of
from evertick.logs.reader import LogLines, LogReader
from evertick.operations.paging import like
from evertick.operations.task_logs import with_short_paths
from evertick.ui.layout import json_text

MOST_LINES = 300


MOST_CHARACTERS = 400_000


# The number of chunks of the first read of a window, the number of reads per window, and the chunks of one search (2 MB).
_CHUNKS, _ROUNDS, _SEARCHED = 8, 4, 32


_PLACE = re.compile(r"(\d{1,9})\.(\d{1,18})\.(\d{1,9})")


_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")


# A variable that holds a value of a command: between single quotes, with its own quotes, or within double quotes.
_VALUE = re.compile(r"""(?P<single>'")?(?P<own>(?<!\w)")?\$\{(?P<name>EVERTICK_VALUE_\d+)\}(?(single)"')(?(own)")""")


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


async def read_onward(reader: LogReader, key: TaskKey, place: LogPosition, log_filter: LogFilter) -> Window:
    lines: list[tuple[LogPosition, Line]] = []
    end, size, batch, is_end = place, 0, _first_batch(log_filter), False
    for _ in range(_ROUNDS):
        chunks = await reader.onward(key, at=end[:2], sought=log_filter.sought, limit=batch)
        for at, line in _numbered(chunks):
            if at < end and at[:2] == end[:2]:  # in the same chunk
                continue
            if len(lines) >= MOST_LINES or size >= MOST_CHARACTERS:
                return Window(lines, place, at, is_start=False, is_end=False)
            end = at._replace(line=at.line + 1)
            if log_filter.fits(line):
                lines.append((at, line))
                size += len(line.text)
        is_end = len(chunks) < batch
        if is_end or log_filter.sought != ANY:
            break
        batch = _next_batch(chunks)
    return Window(lines, place, end, is_start=place == START, is_end=is_end)


async def read_backward(reader: LogReader, key: TaskKey, place: LogPosition, log_filter: LogFilter) -> Window:
    lines: list[tuple[LogPosition, Line]] = []
    begin, end, size, batch, is_start = place, place, 0, _first_batch(log_filter), False
    for _ in range(_ROUNDS):
        chunks = await reader.backward(key, at=begin[:2], sought=log_filter.sought, limit=batch)
        for at, line in _numbered_back(chunks):
            if at >= begin:
                continue
            if end == END:
                end = at._replace(line=at.line + 1)
            if len(lines) >= MOST_LINES or size >= MOST_CHARACTERS:
                return Window(lines[::-1], begin, end, is_start=False, is_end=place == END)
            begin = at
            if log_filter.fits(line):
                lines.append((at, line))
                size += len(line.text)
        is_start = len(chunks) < batch
        if is_start or log_filter.sought != ANY:
            break
        batch = _next_batch(chunks)
    if end == END:
        end = START
    return Window(lines[::-1], begin, end, is_start=is_start, is_end=place == END)


@dataclass(frozen=True, slots=True)
class HitCount:
    """The number of matching lines from a position up to `next`."""

    hits: int
    next: LogPosition
    is_end: bool


async def count_onward(reader: LogReader, key: TaskKey, place: LogPosition, log_filter: LogFilter) -> HitCount:
    """Count matching lines in the next _SEARCHED chunks that can match."""
    chunks = await reader.onward(key, at=place[:2], sought=log_filter.sought, limit=_SEARCHED)
    hits, end = 0, place
    for at, line in _numbered(chunks):
        if at < place and at[:2] == place[:2]:
            continue
        hits += log_filter.fits(line)
        end = at._replace(line=at.line + 1)
    return HitCount(hits, end, is_end=len(chunks) < _SEARCHED)


def _first_batch(log_filter: LogFilter) -> int:
    return _CHUNKS if log_filter.sought == ANY else _SEARCHED


def _next_batch(chunks: Sequence[LogLines]) -> int:
    """As many chunks as probably fill a window. A task that prints slowly has one line per chunk."""
    average = sum(len(each.content) for each in chunks) // len(chunks)
    return min(max(MOST_CHARACTERS // max(average, 1), _CHUNKS), MOST_LINES)


def _numbered(chunks: Sequence[LogLines]) -> Iterator[tuple[LogPosition, Line]]:
    for chunk in chunks:
        lines = lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)
        for number, line in enumerate(lines):
            yield LogPosition(chunk.epoch, chunk.seq, number), line


def _numbered_back(chunks: Sequence[LogLines]) -> Iterator[tuple[LogPosition, Line]]:
    for chunk in chunks:
        yield from reversed(list(_numbered([chunk])))


def plain(text: str) -> str:
    """Remove terminal colours and the folders of bundles, for browsers without scripts."""
    return with_short_paths(_ANSI.sub("", text))


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
    """The rendered fields. A command is shown with its values in place of the variables that hold them."""
    fields = _told_fields(content)
    values = {name: text for name, text in fields if _VALUE.fullmatch(f"${{{name}}}")}
    return [(name, _filled(text, values)) for name, text in fields if name not in values]


def _filled(command: str, values: Mapping[str, str]) -> str:
    """The command as it reads. See sdk/shell_templates.py for the quotes around a variable."""

    def quoted(found: re.Match[str]) -> str:
        value = values.get(found["name"])
        if value is None:
            return found[0]
        if found["single"]:
            return value.replace("'", "'\\''")
        return shlex.quote(value) if found["own"] else re.sub(r'([\\"$`])', r"\\\1", value)

    return _VALUE.sub(quoted, command) if values else command


def _told_fields(content: str) -> list[tuple[str, str]]:
    told = [line.text.partition(" = ") for line in lines_of(content, epoch=0, is_late=False) if line.level == RENDERED]
    return [(name, _shown(text)) for name, _, text in told]


def _shown(text: str) -> str:
    """Return text unchanged and other values as formatted JSON, also if the log truncated the value."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else json_text(value)
