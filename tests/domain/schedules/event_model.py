"""What events become, told by looking at all of them afterwards: the model for debounce and batches, without any state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby, pairwise
from typing import NamedTuple

from evertick.domain.schedules.events import EventMode, EventTrigger


class Sent(NamedTuple):
    number: int
    at: datetime
    group: str


def groups_of(trigger: EventTrigger, sent: Sequence[Sent]) -> list[list[int]]:
    """The groups of events that each become a run, by their numbers."""
    if trigger.mode is EventMode.EACH:
        return [[each.number] for each in sent]
    found: list[list[int]] = []
    for _, some in groupby(sorted(sent, key=lambda each: each.group), key=lambda each: each.group):
        events = list(some)
        found += _quiet(trigger, events) if trigger.mode is EventMode.DEBOUNCE else _batches(trigger, events)
    return found


def _quiet(trigger: EventTrigger, events: list[Sent]) -> Iterator[list[int]]:
    """The events after which nothing came for so long."""
    quiet = timedelta(seconds=trigger.seconds or 0)
    yield from ([one.number] for one, after in pairwise(events) if after.at - one.at >= quiet)
    yield [events[-1].number]


def _batches(trigger: EventTrigger, events: list[Sent]) -> Iterator[list[int]]:
    while events:
        over = events[0].at + timedelta(seconds=trigger.seconds or 0)
        batch = [each for each in events if each.at < over][: trigger.count]
        yield [each.number for each in batch]
        events = events[len(batch) :]
