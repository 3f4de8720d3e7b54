"""The lines of a task's log as they are stored: `<unix microseconds> <level> <text>`. What does not look so is shown as it is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

# The level of lines that tell what a task's templates became: `name = JSON`, before anything that the task wrote.
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
