"""Times as people read them in a terminal: those of the domain, and the clock of this machine's zone."""

from __future__ import annotations

from datetime import datetime

from evertick.domain.durations import NEVER, length, relative, took

__all__ = ["NEVER", "clock", "length", "relative", "took"]


def clock(instant: datetime | None) -> str:
    """The date and time here, to the second."""
    return NEVER if instant is None else f"{instant.astimezone():%Y-%m-%d %H:%M:%S}"
