"""Stored lines of a task's log: `<unix microseconds> <level> <text>`. A line in another format is shown unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

# The level of lines that show a task's rendered templates: `name = JSON`, before any output of the task.
RENDERED = "RENDER"


class Line(NamedTuple):
    epoch: int
    at: datetime | None
    level: str
    text: str
    is_late: bool


def lines_of(content: str, *, epoch: int, is_late: bool) -> Iterator[Line]:
    for raw in content.removesuffix("\n").split("\n"):
        micros, _, rest = raw.partition(" ")
        level, _, text = rest.partition(" ")
        if micros.isdecimal() and len(micros) == 16 and level.isupper():
            at = datetime.fromtimestamp(int(micros) // 1_000_000, UTC).replace(microsecond=int(micros) % 1_000_000)
            yield Line(epoch, at, level, text, is_late)
        else:
            yield Line(epoch, None, "RAW", raw, is_late)
