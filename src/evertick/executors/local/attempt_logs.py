"""Ships attempts' logs from the spool: new lines while they run, the rest when they end. Keeps files until stored."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from evertick.domain.attempt import TaskKey
from evertick.executors.local.child_process import Attempt, ExecutorLimits
from evertick.logs import format
from evertick.logs.spool import AttemptLog, LogChunk, SpoolFolder, coroutine_spool

_SHIPPED_AFTER_SECONDS = 0.1
# A thousand triggers write seldom, and one that does not has no file.
_TRIGGER_POLL_SECONDS = 2.0
# Of triggers; the lines of others arrive at their end. Each is an open file.
_MOST_OPEN_LOGS = 200
# Reading and checking 1 MiB takes about 10 ms of the runner's loop.
_WINDOWS_PER_POLL = 16


class LastLines(NamedTuple):
    """The part of a log that is sent with the outcome."""

    content: bytes = b""
    offset: int = 0
    end: int = 0


class AttemptLogs:
    def __init__(self, folder: SpoolFolder, limits: ExecutorLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._unread: dict[tuple[TaskKey, int], Attempt] = {}
        self._unstored: dict[tuple[TaskKey, int], Attempt] = {}
        self._handed_out: list[Attempt] = []
        self._open_logs = 0

    def poll(self, running: Iterable[Attempt], now: float) -> list[LogChunk]:
        """New lines of attempts that have run for a while, and the rest of ended ones.

        Calling it again confirms that the previous chunks are stored.
        """
        handed_out, self._handed_out = self._handed_out, []
        for attempt in handed_out:
            self._drained(attempt)
        attempts = list(running)
        self._open_logs = sum(each.log is not None for each in attempts if each.order.is_trigger)
        due = [attempt for attempt in attempts if self._is_due(attempt, now)]
        due += self._unread.values()
        share = max(1, _WINDOWS_PER_POLL // max(1, len(due)))
        return [chunk for attempt in due for chunk in self._chunks(attempt, share)]

    def _is_due(self, attempt: Attempt, now: float) -> bool:
        if not attempt.order.is_trigger:
            return now - attempt.started_at >= _SHIPPED_AFTER_SECONDS
        if attempt.link is None or now - attempt.polled_at < _TRIGGER_POLL_SECONDS:
            return False
        attempt.polled_at = now
        return attempt.log is not None or self._open_logs < _MOST_OPEN_LOGS

    def ended(self, attempt: Attempt, end: int | None, trouble: str | None) -> LastLines:
        """The attempt writes no more; `end` is its last byte, if reported. A long rest is left to `poll`."""
        log = self._log_of(attempt) if end != 0 or attempt.log is not None else None
        if log is None or attempt.spool is None:
            attempt.is_drained = attempt.is_settled = True
            return LastLines(_mark(trouble))
        log.close(os.fstat(attempt.spool.fd).st_size if end is None else end)
        name = attempt.order.key, attempt.order.epoch
        self._unstored[name] = attempt
        if log.pending_bytes > self._limits.inline_log_bytes:
            self._unread[name] = attempt
            # Not with the outcome: the rest begins at the same byte, and of two chunks at the same offset only one is
            # kept.
            attempt.last_words = _mark(trouble)
            return LastLines(b"", log.offset, log.offset)
        offset, parts = log.offset, []
        while log.pending_bytes > 0:
            parts.append(log.next_lines())
        self._drained(attempt)
        if not attempt.spool.path:
            trouble = "the log could not be kept (spool disk full or unwritable)"
        return LastLines(b"".join(parts) + _mark(trouble), offset, log.offset)

    def settle(self, ended: Iterable[tuple[TaskKey, int]]) -> None:
        """These outcomes are stored, and their last lines with them."""
        for name in ended:
            if (attempt := self._unstored.get(name)) is not None:
                attempt.is_settled = True
                self._forget_if_stored(attempt)

    def trim(self, running: Iterable[Attempt]) -> None:
        for attempt in running:
            if attempt.log is not None:
                attempt.log.trim()

    def _chunks(self, attempt: Attempt, at_most: int) -> list[LogChunk]:
        chunks: list[LogChunk] = []
        log = self._log_of(attempt)
        order = attempt.order
        while log is not None and len(chunks) < at_most:
            offset = log.offset
            content = log.next_lines()
            if log.offset == offset:
                break
            if content:
                chunk = LogChunk(key=order.key, epoch=order.epoch, offset=offset, end=log.offset, content=content)
                chunks.append(chunk)
        name = order.key, order.epoch
        if name in self._unread and (log is None or log.pending_bytes <= 0):
            if log is not None and attempt.last_words:
                at, words = log.offset, attempt.last_words
                chunks.append(LogChunk(key=order.key, epoch=order.epoch, offset=at, end=at, content=words))
            del self._unread[name]
            self._handed_out.append(attempt)
        return chunks

    def _log_of(self, attempt: Attempt) -> AttemptLog | None:
        """A coroutine's file exists only once it has written something."""
        link = attempt.link
        if attempt.log is None and link is not None and link.is_shared:
            path = coroutine_spool(link.spool.path, link.number, attempt.number)
            with suppress(OSError):
                attempt.spool = self._folder.file(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), is_finished=True)
                attempt.spool.acquire()
                attempt.log = AttemptLog(attempt.spool.fd, 0, self._limits.log_cap)
        return attempt.log

    def _drained(self, attempt: Attempt) -> None:
        if attempt.spool is not None and not attempt.is_drained:
            attempt.is_drained = True
            attempt.spool.stop_reading()
        self._forget_if_stored(attempt)

    def _forget_if_stored(self, attempt: Attempt) -> None:
        if attempt.is_drained and attempt.is_settled:
            self._unstored.pop((attempt.order.key, attempt.order.epoch), None)
            if attempt.spool is not None:
                attempt.spool.stop_keeping()


def _mark(trouble: str | None) -> bytes:
    return format.mark(time.time_ns() // 1000, f"… {trouble} …") if trouble else b""
