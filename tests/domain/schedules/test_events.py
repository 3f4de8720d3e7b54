"""The rules of `on_event`: which events fit, what they give to a run, and groups that equal the model."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from evertick.domain.errors import InvalidSchedule
from evertick.domain.schedules.events import (
    EventTrigger,
    EventWindow,
    SentEvent,
    add,
    captured,
    close,
    group_of,
    on_event,
    read_text,
    run_params,
    to_text,
)
from tests.domain.schedules.event_model import Sent, groups_of

START = datetime(2030, 1, 1, tzinfo=UTC)


def event(number: int = 1, *, name: str = "e", payload: object = None, at: datetime = START) -> SentEvent:
    return SentEvent(event_id=number, name=name, key=None, payload=payload, sent_at=at)


def test_ten_thousand_sequences_equal_the_model_whenever_somebody_looks() -> None:
    dice = random.Random(1)
    for _ in range(10_000):
        trigger = dice.choice(
            [on_event("e", debounce=dice.choice([1, 3])), on_event("e", batch=(dice.randint(1, 4), 3))]
        )
        at, found, window, sent = START, [], EventWindow(), []
        for number in range(dice.randint(1, 12)):
            at += timedelta(seconds=dice.choice([0, 0.5, 1, 2.9, 3, 7]))
            if dice.random() < 0.3:
                complete, window = close(trigger, window, at - timedelta(seconds=dice.choice([0, 0.5])))
                found += complete
            complete, window = add(trigger, window, event(number, at=at))
            found += complete
            sent.append(Sent(number, at, ""))
        found += close(trigger, window, at + timedelta(hours=1))[0]
        assert [list(each.event_ids) for each in found] == groups_of(trigger, sent), (trigger, sent)


@pytest.mark.parametrize(
    ("name", "where", "sent", "payload", "parts"),
    [
        ("orders.{region}", None, "orders.eu", None, {"region": "eu"}),
        ("orders.{region}", None, "orders.eu.x", None, None),
        ("orders.{a}.{b}", None, "orders.eu.x", None, {"a": "eu", "b": "x"}),
        ("a+b", None, "aab", None, None),
        ("e", {"x.y": 1}, "e", {"x": {"y": 1}}, {}),
        ("e", {"x.y": 1}, "e", {"x": 1}, None),
        ("e", {"x": 1}, "e", {"x": True}, None),
        ("e", {"x": None}, "e", {}, {}),
        ("e", {"x": ["a", "b"]}, "e", {"x": "b"}, {}),
        ("e", {"x": {"min": 2}}, "e", {"x": 2.5}, {}),
        ("e", {"x": {"min": 2, "max": 3}}, "e", {"x": 4}, None),
        ("e", {"x": {"max": 3}}, "e", {"x": "2"}, None),
    ],
)
def test_which_events_fit(name: str, where: Any, sent: str, payload: object, parts: dict[str, str] | None) -> None:
    trigger = on_event(name, each=True, where=where)
    assert captured(trigger, event(name=sent, payload=payload)) == parts
    assert read_text(to_text(trigger)) == trigger


def test_what_events_are_grouped_by() -> None:
    sent = event(name="orders.eu", payload={"id": 7, "of": {"x": "a"}})
    for key, group in (("id", "7"), ("of", '{"x": "a"}'), ("region", "eu"), ("none", "null")):
        trigger = on_event("orders.{region}", debounce=1, key=key)
        assert group_of(trigger, sent, {"region": "eu"}) == group
    assert group_of(on_event("orders.{region}", debounce=1), sent, {}) == "orders.eu"
    assert group_of(on_event("orders.{region}", each=True), sent, {}) is None


def test_the_parameters_of_a_run() -> None:
    trigger, sent = (
        on_event("orders.{region}", each=True),
        event(5, name="orders.eu", payload={"rows": 3, "region": "us"}),
    )
    shown = {"id": 5, "name": "orders.eu", "key": None, "sent_at": "2030-01-01T00:00:00Z", "payload": sent.payload}
    declared = {"rows", "region", "event", "events", "payload", "fixed"}
    found = run_params(trigger, [sent, sent], declared, {"fixed": 1, "rows": 0})
    assert found == {
        "fixed": 1, "rows": 3, "region": "eu", "event": shown, "events": [shown, shown], "payload": sent.payload,
    }  # fmt: skip
    assert run_params(trigger, [event(payload=[1])], {"rows"}, {}) == {}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "needs one of"),
        ({"each": True, "debounce": 1}, "needs one of"),
        ({"debounce": "soon"}, "soon"),
        ({"debounce": 0}, "from 10 ms to a day"),
        ({"debounce": True}, "is not a time"),
        ({"batch": 5}, "write the number of events and a time"),
        ({"batch": (0, 1)}, "must have 1 to 1,000"),
        ({"batch": (5, "2d")}, "from 10 ms to a day"),
        ({"each": True, "key": ""}, "must be a path"),
        ({"each": True, "where": {}}, "1 to 20 paths"),
        ({"each": True, "where": {"x": {"least": 1}}}, "write a value"),
        ({"each": True, "where": {"x": [[1]]}}, "write a value"),
    ],
)
def test_a_wrong_trigger_says_what_is_wrong(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidSchedule, match=problem):
        on_event("e", **options)


@pytest.mark.parametrize("name", ["", " a", "a{", "{a}{a}", "{1}", "x" * 300])
def test_a_wrong_name(name: str) -> None:
    with pytest.raises(InvalidSchedule, match="on_event"):
        on_event(name, each=True)
    with pytest.raises(InvalidSchedule, match="write on_event"):
        read_text('{"name": 1')
    assert isinstance(on_event("a", each=True), EventTrigger)
