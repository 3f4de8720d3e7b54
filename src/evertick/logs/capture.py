"""Inside an attempt's process: print, stderr and logging become spool lines, each with its time and level.

A full disk never fails the task: bytes that cannot be written are counted, and a mark reports them as soon as there is
room.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from evertick.logs import format

TASK_LOGGER = "evertick.task"
# With secrets to mask, an unfinished line is held back up to this length: a cut could split a secret.
_LONGEST_HELD_CHARS = 1024 * 1024


class SpoolWriter:
    """Appends lines to one spool file. Safe in threads and after a fork: one write per call, no lock."""

    __slots__ = ("dropped_bytes", "fd", "mask")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.dropped_bytes = 0
        # Masks secrets; most attempts have none.
        self.mask: Callable[[str], str] | None = None

    def write_text(self, level: str, text: str) -> None:
        if self.mask is not None:
            text = self.mask(text)
        self.append(format.framed(time.time_ns() // 1000, level, text))

    def append(self, spooled: bytes) -> None:
        if self.dropped_bytes:
            note = format.framed(time.time_ns() // 1000, "MARK", f"… {self.trouble()} …")
            if self._try(note) == len(note):
                self.dropped_bytes = 0
        self.dropped_bytes += len(spooled) - self._try(spooled)

    def trouble(self) -> str | None:
        """A description of what is missing from the file so far."""
        return f"{self.dropped_bytes:,} bytes dropped (spool disk full)" if self.dropped_bytes else None

    def _try(self, spooled: bytes) -> int:
        try:
            return os.write(self.fd, spooled)
        except OSError:
            return 0


class Captured:
    """Where this process's lines go: the process's own file, or that of the running coroutine."""

    def __init__(self, writer: SpoolWriter) -> None:
        self.writer = writer
        self.of_coroutine: ContextVar[SpoolWriter | None] = ContextVar("evertick_spool", default=None)

    @property
    def is_hiding(self) -> bool:
        return self.writer.mask is not None

    @property
    def current(self) -> SpoolWriter:
        return self.of_coroutine.get() or self.writer


class CapturedStream(io.TextIOBase):
    """Replaces sys.stdout or sys.stderr. Each thread's unfinished line waits for its newline."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, captured: Captured, level: str, raw_fd: int) -> None:
        self._captured = captured
        self._level = level
        self._raw_fd = raw_fd
        self._unfinished: dict[int, str] = {}
        self.buffer = io.FileIO(raw_fd, "wb", closefd=False)

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        thread = threading.get_ident()
        whole, newline, rest = (self._unfinished.pop(thread, "") + text).rpartition("\n")
        if newline:
            self._captured.current.write_text(self._level, whole)
        if len(rest) > format.LONGEST_LINE_CHARS and not (self._captured.is_hiding and len(rest) < _LONGEST_HELD_CHARS):
            self._captured.current.write_text(self._level, rest)
        elif rest:
            self._unfinished[thread] = rest
        return len(text)

    def finish_lines(self) -> None:
        """Write the lines that never got their newline: the attempt has ended."""
        while self._unfinished:
            self._captured.current.write_text(self._level, self._unfinished.popitem()[1])

    def fileno(self) -> int:
        return self._raw_fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False


class CapturedLogging(logging.Handler):
    """Writes log records with their level. Replaces handlers that would print to the console."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self._captured = captured
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            name = "" if record.name in (TASK_LOGGER, "root") else f"{record.name}: "
            level = record.levelname if record.levelname in _LEVELS else _nearest_level(record.levelno)
            self._captured.current.write_text(level, name + self.format(record))
        except Exception:
            self.handleError(record)


_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})


def capture_streams(captured: Captured) -> None:
    """Called before user code is imported, so that a handler it creates holds these streams."""
    sys.stdout = CapturedStream(captured, "OUT", 1)
    sys.stderr = CapturedStream(captured, "ERR", 2)


def capture_logging(captured: Captured) -> None:
    """Called after user code is imported: this handler replaces the root's console handlers and keeps their format."""
    root = logging.getLogger()
    ours = CapturedLogging(captured)
    for handler in root.handlers[:]:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, CapturedStream):
            root.removeHandler(handler)
            if handler.formatter is not None:
                ours.setFormatter(handler.formatter)
    if not any(isinstance(handler, CapturedLogging) for handler in root.handlers):
        root.addHandler(ours)
    if root.level == logging.WARNING:
        root.setLevel(logging.INFO)


def finish_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, CapturedStream):
            stream.finish_lines()
        elif stream is not None:
            _flush(stream)


def _flush(stream: Any) -> None:
    """User code may have replaced the stream by its own object, and may have closed it."""
    with suppress(Exception):
        stream.flush()


def _nearest_level(number: int) -> str:
    return logging.getLevelName(min(50, max(10, number // 10 * 10)))
