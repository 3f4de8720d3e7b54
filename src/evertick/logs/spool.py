"""Attempts' logs on disk, the spool: written by the attempt's process, read by the runner, one window in memory at most.

Each process writes one file under `<spool>/<session>/`; an attempt's lines are a contiguous part of it, so that neither
the runner's death nor a database outage loses any. Beyond the cap the middle is dropped, with a mark.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evertick.domain.attempt import TaskKey, session_text
from evertick.logs import format
from evertick.processes.system import punch_hole

WINDOW_BYTES = 64 * 1024


_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCap:
    """How much of an attempt's log is kept."""

    head_bytes: int = 4 * 1024 * 1024
    tail_bytes: int = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """Whole lines of one attempt's log.

    It covers the spool's bytes from `offset` to `end`, counted from the attempt's start. Chunks of one attempt follow
    each other without overlap, so the largest stored `end` is where to continue after a crash.
    """

    key: TaskKey
    epoch: int
    offset: int
    end: int
    content: bytes


class AttemptLog:
    """One attempt's part of a spool file, read once from front to back."""

    __slots__ = ("_cap", "_cursor", "_end", "_fd", "_is_in_tail", "_punched_to", "_start")

    def __init__(self, fd: int, start: int, cap: LogCap, *, shipped_until: int = 0) -> None:
        self._fd = fd
        self._start = start
        self._cap = cap
        self._cursor = start + shipped_until
        self._end: int | None = None
        self._is_in_tail = False
        self._punched_to = start

    def close(self, end: int) -> None:
        """The attempt has ended and its last byte is known."""
        self._end = end

    @property
    def offset(self) -> int:
        return self._cursor - self._start

    @property
    def pending_bytes(self) -> int:
        """How much there is to read, without the middle that the cap drops."""
        room = self._cap.tail_bytes + max(0, self._start + self._cap.head_bytes - self._cursor)
        return min(self._size() - self._cursor, room)

    def next_lines(self, limit: int = WINDOW_BYTES) -> bytes:
        """The next whole lines, ready to ship; empty when there are none yet. Moves `offset` to their end."""
        size, note = self._size(), b""
        now_micros = time.time_ns() // 1000
        if not self._is_in_tail:
            raw = self._read_lines(self._head_end(size), limit)
            if raw or self._end is None or self._cursor >= size:
                return format.shipped(raw, now_micros)
            if size - self._cursor <= self._cap.tail_bytes:
                self._cursor = size  # the file is shorter than reported: it was truncated
                return b""
            note = self._skip_middle(size, now_micros)
        return note + format.shipped(self._read_lines(size, limit), now_micros)

    def trim(self) -> None:
        """Free the disk space of what the cap drops, while the attempt is still writing."""
        first = -(-max(self._start + self._cap.head_bytes, self._punched_to) // _PAGE_BYTES) * _PAGE_BYTES
        last = (self._size() - self._cap.tail_bytes) // _PAGE_BYTES * _PAGE_BYTES
        if last > first:
            punch_hole(self._fd, first, last - first)
            self._punched_to = last

    def _size(self) -> int:
        return self._end if self._end is not None else os.fstat(self._fd).st_size

    def _head_end(self, size: int) -> int:
        """Where reading must stop until the attempt has ended and the tail is known."""
        is_whole = self._end is not None and size - self._start <= self._cap.head_bytes + self._cap.tail_bytes
        return size if is_whole else min(size, self._start + self._cap.head_bytes)

    def _read_lines(self, end: int, limit: int) -> bytes:
        """Up to the last newline. A line beyond the limit is cut; an ended attempt's last line needs no newline."""
        wanted = min(limit, end - self._cursor)
        if wanted <= 0:
            return b""
        raw = os.pread(self._fd, wanted, self._cursor)
        if self._cursor + len(raw) != self._end:
            cut = raw.rfind(b"\n") + 1
            if cut == 0 and len(raw) < limit:
                return b""
            raw = raw[:cut] if cut else raw
        self._cursor += len(raw)
        return raw

    def _skip_middle(self, size: int, now_micros: int) -> bytes:
        """Skip to the first line of the tail and report how much is missing."""
        self._is_in_tail = True
        tail_start = size - self._cap.tail_bytes
        window = os.pread(self._fd, min(WINDOW_BYTES, self._cap.tail_bytes), tail_start)
        tail_start += window.find(b"\n") + 1
        dropped = tail_start - self._cursor
        self._cursor = tail_start
        return format.mark(now_micros, f"… {dropped:,} bytes dropped (log cap) …")


def session_folder(spool_dir: Path, session: int) -> Path:
    """The spool folder of a runner's session. Private: a log may contain what a task prints."""
    folder = spool_dir / session_text(session)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def open_spool(path: str, *, is_new: bool = True) -> int:
    """A spool file, shared by the process that appends to it and the runner that reads it."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags | os.O_CREAT | os.O_EXCL if is_new else flags, 0o600)


def coroutine_spool(process_path: str, child: int, attempt: int) -> str:
    """The file of one coroutine among the many of a reused process; both the runner and the process derive its name."""
    return f"{process_path.removesuffix('.log')}-{child}-{attempt}.log"


class SpoolFolder:
    """A session's spool. Files are removed in bulk: where a database syncs the same disk, one removal may wait for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._holders: dict[str, int] = {}
        self._finished: set[str] = set()
        self._stored: list[str] = []

    def file(self, path: str, fd: int, *, is_finished: bool = False) -> SpoolFile:
        """One user of a file, which may have others. `is_finished`: no further users will follow."""
        self._holders[path] = self._holders.get(path, 0) + 1
        if is_finished:
            self._finished.add(path)
        return SpoolFile(self, path, fd)

    def release(self, path: str) -> None:
        """All lines of one user are stored."""
        self._holders[path] -= 1
        if self._holders[path] == 0:
            del self._holders[path]
            if path in self._finished:
                self.finish(path)

    def finish(self, path: str) -> None:
        """No process will write to it any more: it is deleted when all of it is stored."""
        if path in self._holders:
            self._finished.add(path)
        else:
            self._finished.discard(path)
            self._stored.append(path)

    def take_stored(self) -> list[str]:
        stored, self._stored = self._stored, []
        return stored

    def abandon(self, prefix: str) -> None:
        """A fork server is gone, and no process writes to its files."""
        for path in self.path.glob(f"{prefix}*"):
            self.finish(str(path))


def remove_files(paths: list[str]) -> None:
    """Files that cannot be removed are found again as orphaned logs."""
    for path in paths:
        with suppress(OSError):
            Path(path).unlink()


class SpoolFile:
    """A spool file and its users. The descriptor is closed when it has no reader, the file is deleted when all of it is
    stored."""

    __slots__ = ("_folder", "_keepers", "_readers", "fd", "path")

    def __init__(self, folder: SpoolFolder, path: str, fd: int) -> None:
        self._folder = folder
        self.path = path
        self.fd = fd
        self._readers = 0
        self._keepers = 0

    def acquire(self) -> None:
        self._readers += 1
        self._keepers += 1

    def stop_reading(self) -> None:
        self._readers -= 1
        if self._readers == 0:
            os.close(self.fd)

    def stop_keeping(self) -> None:
        self._keepers -= 1
        if self._keepers == 0:
            self._folder.release(self.path)


# Limits the attempts per file: after a runner's death, each of them is looked up in the database.
_MOST_USES = 32
_LONGEST_REUSED_BYTES = 64 * 1024


class OpenSpool(NamedTuple):
    """A file to write to from `start` on; an empty path where none could be opened."""

    path: str
    fd: int
    start: int


class SpoolIndex:
    """The spool files of a fork server's children. A small file is reused by a later child, which appends to it.

    The more files were removed recently, the longer a file system searches for a place for a new one: with a file per
    attempt that took 0.2 ms at 400 attempts per second. Never reuses a file whose process tree is not known to be gone.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._made = 0
        self._uses: dict[str, int] = {}
        self._free: list[str] = []

    def open(self) -> OpenSpool:
        """A full disk costs the log, not the task."""
        while self._free:
            path = self._free.pop()
            with suppress(OSError):
                fd = open_spool(path, is_new=False)
                return OpenSpool(path, fd, os.lseek(fd, 0, os.SEEK_END))
            del self._uses[path]
        self._made += 1
        path = f"{self._prefix}{self._made}.log"
        try:
            fd = open_spool(path)
        except OSError:
            return OpenSpool("", open_nowhere(), 0)
        self._uses[path] = 0
        return OpenSpool(path, fd, 0)

    def put_back(self, path: str) -> bool:
        """Every process that could write to it is gone. Returns whether the file will not be reused."""
        uses = self._uses.pop(path, _MOST_USES) + 1
        if uses >= _MOST_USES or _size(path) > _LONGEST_REUSED_BYTES:
            return True
        self._uses[path] = uses
        self._free.append(path)
        return False


def open_nowhere() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return _LONGEST_REUSED_BYTES + 1
