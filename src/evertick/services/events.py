"""One line per event: JSON for programs, short coloured text for people. Never a secret, never a payload."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

Log = structlog.typing.FilteringBoundLogger


def configure(*, service: str, as_json: bool, stream: TextIO | None = None) -> Log:
    """The log of one process. `service` stands on every line."""
    shown: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _error_text,
        structlog.processors.JSONRenderer(default=str) if as_json else render_for_people,
    ]
    structlog.configure(processors=shown, logger_factory=structlog.PrintLoggerFactory(file=stream or sys.stdout))
    log: Log = structlog.get_logger(service=service)
    return log


_DIM, _RED, _YELLOW, _GREEN, _CYAN, _END = "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[36m", "\x1b[0m"
_GOOD = {"success", "ready", "started"}
_HIDDEN = {"timestamp", "level", "event", "service", "message"}


def render_for_people(_: WrappedLogger, __: str, event: EventDict) -> str:
    """12:00:01 scheduler  fire  dag=etl run=12"""
    return render_line(dict(event), is_colored=sys.stdout.isatty())


def render_line(event: dict[str, object], *, is_colored: bool) -> str:
    """The same event that JSON carries, for a terminal."""
    level, name = str(event.get("level", "info")), str(event.get("event", ""))
    clock = _local_clock(str(event.get("timestamp", "")))
    fields = " ".join(f"{key}={_short(value)}" for key, value in event.items() if key not in _HIDDEN)
    text = f"{event['message']} {fields}".strip() if "message" in event else fields
    tone = {"error": _RED, "critical": _RED, "warning": _YELLOW}.get(level, "")
    if not is_colored:
        return f"{clock} {event.get('service', ''):<10} {name:<10} {text}".rstrip()
    if not tone and any(str(value) in _GOOD for value in event.values()):
        tone = _GREEN
    return (
        f"{_DIM}{clock}{_END} {_CYAN}{event.get('service', ''):<10}{_END} {tone}{name:<10}{_END if tone else ''} {text}"
    ).rstrip()


def _local_clock(stamp: str) -> str:
    """The reader's wall clock, as in every table of the command line."""
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return stamp[:8]


def _short(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _error_text(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """An exception in a field is shown as its type and message."""
    for key, value in event.items():
        if isinstance(value, BaseException):
            event[key] = f"{type(value).__name__}: {value}"
    return event
