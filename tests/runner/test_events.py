"""The queue of a session's events."""

from __future__ import annotations

import pytest

from evertick.runner.events import EventQueue


async def test_events_are_taken_once_in_their_order_and_wake_the_loop() -> None:
    events = EventQueue[int]()
    assert list(events.take()) == [] and not events.wake.is_set()
    events.put(1)
    events.put(2)
    assert events.wake.is_set() and events.has_arrived.is_set()
    assert list(events.take()) == [1, 2]
    assert list(events.take()) == []


async def test_an_event_that_cannot_be_applied_keeps_the_others() -> None:
    events = EventQueue[int]()
    for number in (1, 0, 2):
        events.put(number)
    applied = []
    with pytest.raises(ZeroDivisionError):
        for number in events.take():
            applied.append(2 // number)
    assert [2 // number for number in events.take()] == [1]
    assert applied == [2]


async def test_an_event_that_arrives_while_events_are_applied_is_applied_too() -> None:
    events = EventQueue[int]()
    events.put(1)
    seen = []
    for number in events.take():
        seen.append(number)
        if number < 3:
            events.put(number + 1)
    assert seen == [1, 2, 3]
