"""Rendered template fields of a task per attempt, read from the beginning of each attempt's log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from evertick.domain.attempt import TaskKey
from evertick.domain.log_lines import RENDERED, lines_of
from evertick.services.log_reading import LogReader
from evertick.store.tasks import AttemptRow
from evertick.ui.words import json_text

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
    told = [line.text.partition(" = ") for line in lines_of(content, epoch=0, is_late=False) if line.level == RENDERED]
    return [(name, _shown(text)) for name, _, text in told]


def _shown(text: str) -> str:
    """Return text unchanged and other values as formatted JSON, also if the log truncated the value."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else json_text(value)
