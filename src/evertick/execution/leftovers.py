"""Orphaned logs that a dead runner left in its spool, to be shipped late. Never touches the spool of a live session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evertick.domain.attempt import TaskKey
from evertick.execution import lines
from evertick.execution.spool import WINDOW_BYTES, AttemptLog, LogCap, LogChunk, session_name

_LONGEST_HEADER_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """The log of an attempt whose runner died before it could ship everything."""

    key: TaskKey
    epoch: int
    session: int
    path: Path
    start: int
    end: int

    def chunks(self, shipped_until: int = 0, cap: LogCap | None = None) -> Iterator[LogChunk]:
        """The chunks that are not stored yet; `shipped_until` is the largest `end` that is."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            log = AttemptLog(fd, self.start, cap or LogCap(), shipped_until=shipped_until)
            log.close(self.end)
            while log.pending_bytes > 0:
                offset = log.offset
                if content := log.next_lines():
                    yield LogChunk(key=self.key, epoch=self.epoch, offset=offset, end=log.offset, content=content)
        finally:
            os.close(fd)


def leftovers(spool_dir: Path, live_sessions: set[int]) -> Iterator[Leftover]:
    """The logs of sessions that are no longer alive. Ship each, then `discard` its file."""
    live = {session_name(session) for session in live_sessions}
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


def discard(path: Path) -> None:
    """Remove an orphaned log's file, and its session's folder when that was the last."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


def _attempts_in(path: Path) -> Iterator[Leftover]:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            headers = list(_headers_in(fd))
            ends = [start for start, _ in headers[1:]] + [os.fstat(fd).st_size]
        finally:
            os.close(fd)
        for (start, found), end in zip(headers, ends, strict=False):
            yield Leftover(key=found.key, epoch=found.epoch, session=found.session, path=path, start=start, end=end)


def _headers_in(fd: int) -> Iterator[tuple[int, lines.Header]]:
    """Every header of a file, skipping punched holes. Windows overlap, so that no header is cut in two."""
    at, searched_to, end = 0, 0, os.fstat(fd).st_size
    while searched_to < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        window = os.pread(fd, WINDOW_BYTES, at)
        for place, found in lines.find_headers(window):
            if at + place >= searched_to:
                yield at + place, found
                searched_to = at + place + 1
        searched_to = max(searched_to, at + len(window) - _LONGEST_HEADER_BYTES)
        if at + len(window) >= end:
            return
        at = searched_to
