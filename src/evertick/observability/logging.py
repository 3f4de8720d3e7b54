"""Structured logging, one line per event: JSON for programs, short coloured text for people. Never a secret, never a
payload.

A line that cannot be written is dropped and counted: logging must never fail or delay the caller.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from datetime import datetime
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from evertick.observability import metrics

Log = structlog.typing.FilteringBoundLogger


def configure(*, service: str, as_json: bool, owner: str | None = None, stream: TextIO | None = None) -> Log:
    """The logger of one process. `service` and `owner` (its own name) are on every line."""

    def sign(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {"service": service, **({"owner": owner} if owner else {}), **event}

    shown: list[structlog.typing.Processor] = [
        sign,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _error_text,
        structlog.processors.JSONRenderer(default=str) if as_json else render_for_people,
    ]
    lines = LineWriter(stream or sys.stdout)
    structlog.configure(processors=shown, logger_factory=lambda *_: lines)
    log: Log = structlog.get_logger()
    return log


class LineWriter:
    """Writes whole lines. A full disk does not fail the caller, and a pipe that is not read does not block it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._pipe = _pipe_of(stream)
        self._rest = b""
        if self._pipe is not None:
            os.set_blocking(self._pipe, False)

    def msg(self, line: str) -> None:
        try:
            with self._lock:
                if self._pipe is None:
                    self._stream.write(f"{line}\n")
                    self._stream.flush()
                else:
                    self._put(self._pipe, f"{line}\n".encode("utf-8", "replace"))
        except (OSError, ValueError):
            metrics.LOG_LINES_DROPPED.inc()

    debug = info = warning = error = critical = msg

    def _put(self, pipe: int, line: bytes) -> None:
        """Write the rest of a partly written line first: lines stay whole."""
        if self._rest:
            self._rest = self._rest[os.write(pipe, self._rest) :]
        if self._rest:
            raise BlockingIOError
        self._rest = line[os.write(pipe, line) :]


def _pipe_of(stream: TextIO) -> int | None:
    try:
        number = stream.fileno()
        return number if stat.S_ISFIFO(os.fstat(number).st_mode) else None
    except (OSError, ValueError):
        return None


_DIM, _RED, _YELLOW, _GREEN, _CYAN, _END = "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[36m", "\x1b[0m"
_GOOD = {"success", "service_ready", "runner_started"}
_HIDDEN = {"timestamp", "level", "event", "service", "owner", "message"}
# Fields on every line of a service, for programs; people see them once, when the service starts.
_REPEATED = {"runner": {"runner", "name", "session"}}


# Error texts from a cluster or a server often have their point at the end.
_WIDTHS = {"error": 500, "reason": 500}


def render_for_people(_: WrappedLogger, __: str, event: EventDict) -> str:
    """12:00:01 scheduler  fire  dag=etl run=12"""
    return render_line(dict(event), is_colored=sys.stdout.isatty())


def render_line(event: dict[str, object], *, is_colored: bool) -> str:
    """The same event that JSON carries, for a terminal."""
    level, name = str(event.get("level", "info")), str(event.get("event", ""))
    clock = _local_clock(str(event.get("timestamp", "")))
    hidden = _HIDDEN | (_REPEATED.get(str(event.get("service")), set()) if name != "runner_started" else set())
    fields = " ".join(
        f"{key}={_short(value, _WIDTHS.get(key, 120))}" for key, value in event.items() if key not in hidden
    )
    text = f"{event['message']} {fields}".strip() if "message" in event else fields
    tone = {"error": _RED, "critical": _RED, "warning": _YELLOW}.get(level, "")
    if not is_colored:
        return f"{clock} {event.get('service', ''):<10} {name:<19} {text}".rstrip()
    if not tone and any(str(value) in _GOOD for value in event.values()):
        tone = _GREEN
    start = f"{_DIM}{clock}{_END} {_CYAN}{event.get('service', ''):<10}{_END}"
    return f"{start} {tone}{name:<19}{_END if tone else ''} {text}".rstrip()


def _local_clock(stamp: str) -> str:
    """The reader's local time, as in every table of the command line."""
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return stamp[:8]


def _short(value: object, most: int) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _error_text(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Render an exception in a field as its type and message."""
    for key, value in event.items():
        if isinstance(value, BaseException):
            event[key] = f"{type(value).__name__}: {value}"
    return event
