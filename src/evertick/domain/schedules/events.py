"""Events that start runs: `on_event("orders.{region}", ...)`. Which events fit, how they are grouped, and the run's parameters.

Pure, and by the times at which the events were sent, so the runs do not depend on when the leader decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache

from evertick.domain.durations import describe_duration, parse_duration
from evertick.domain.errors import InvalidSchedule

LONGEST_NAME = 200
MOST_EVENTS = 1000
LONGEST_WINDOW = timedelta(days=1)
_MOST_FILTERS = 20
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
# The bounds of a filter, besides a value and a list of values.
_BOUNDS = frozenset({"min", "max"})

Filters = Mapping[str, object]


class EventMode(StrEnum):
    """How many runs there are: one per event, one when no event has come for some time, or one per group of events."""

    EACH = "each"
    DEBOUNCE = "debounce"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTrigger:
    """`name`: with a placeholder for a part between dots. `seconds`: of quiet, or since the first event of a group. `key`: a path
    into the payload, or a placeholder: events with the same value run one after the other, or are grouped."""

    name: str
    mode: EventMode = EventMode.EACH
    seconds: float | None = None
    count: int | None = None
    key: str | None = None
    where: Filters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEvent:
    event_id: int
    name: str
    key: str | None
    payload: object
    sent_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EventWindow:
    """Events that are not a run yet, in the order in which they were sent. Of a debounce only the last one counts."""

    event_ids: tuple[int, ...] = ()
    first_at: datetime | None = None
    last_at: datetime | None = None


def on_event(
    name: str,
    *,
    each: bool = False,
    debounce: str | float | timedelta | None = None,
    batch: tuple[int, str | float | timedelta] | None = None,
    key: str | None = None,
    where: Filters | None = None,
) -> EventTrigger:
    """Run for events: `schedule=on_event("orders.{region}", each=True)`. A placeholder matches a part of the name between dots.

    `each`: a run per event; with `key`, a path into the payload, runs of the same value follow each other. `debounce="5s"`: one
    run once no event has come for so long. `batch=(100, "1s")`: one run per hundred events, or for what came within a second of
    the first. Both for each name, or each value of `key`. `where`: only payloads with these values, as in
    `{"type": "created", "region": ["eu", "us"], "order.total": {"min": 100}}`.
    """
    if (each is True) + (debounce is not None) + (batch is not None) != 1:
        raise InvalidSchedule(f"on_event({name!r}) needs one of each=True, debounce='5s' and batch=(100, '1s')")
    trigger = EventTrigger(name=name, key=key, where=where)
    if debounce is not None:
        trigger = replace(trigger, mode=EventMode.DEBOUNCE, seconds=_seconds("debounce", debounce))
    if batch is not None:
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise InvalidSchedule(f"batch is {batch!r:.40}: write the number of events and a time, as in (100, '1s')")
        trigger = replace(trigger, mode=EventMode.BATCH, count=batch[0], seconds=_seconds("batch", batch[1]))
    _check(trigger)
    return trigger


def to_text(trigger: EventTrigger) -> str:
    """The canonical text of a checked trigger."""
    fields = {
        "name": trigger.name,
        "mode": trigger.mode,
        "seconds": trigger.seconds,
        "count": trigger.count,
        "key": trigger.key,
        "where": trigger.where,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=1000)
def read_text(text: str) -> EventTrigger:
    """The trigger that `to_text` wrote."""
    try:
        raw = json.loads(text)
        trigger = EventTrigger(**{**raw, "mode": EventMode(raw["mode"])})
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidSchedule(f"{text[:40]!r} is not an event: write on_event(...)") from None
    _check(trigger)
    return trigger


def in_words(trigger: EventTrigger) -> str:
    words = f"event {trigger.name}"
    match trigger.mode:
        case EventMode.DEBOUNCE:
            words += f", after {_length(trigger)} without another"
        case EventMode.BATCH:
            words += f", in groups of up to {trigger.count} within {_length(trigger)}"
        case EventMode.EACH:
            words += ", each"
    if trigger.key is not None:
        words += f", {'in order' if trigger.mode is EventMode.EACH else 'separately'} by {trigger.key}"
    return words + (f", where {json.dumps(trigger.where, sort_keys=True)}" if trigger.where else "")


def captured(trigger: EventTrigger, event: SentEvent) -> dict[str, str] | None:
    """The values of the placeholders if the event fits, else None."""
    found = _pattern(trigger.name).fullmatch(event.name)
    if found is None or not all(_fits(event.payload, path, wanted) for path, wanted in (trigger.where or {}).items()):
        return None
    return found.groupdict()


def group_of(trigger: EventTrigger, event: SentEvent, parts: Mapping[str, str]) -> str | None:
    """What the event is grouped or ordered by; None: by nothing."""
    if trigger.key is None:
        return None if trigger.mode is EventMode.EACH else event.name
    value = parts.get(trigger.key, _at(event.payload, trigger.key))
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def add(trigger: EventTrigger, window: EventWindow, event: SentEvent) -> tuple[list[EventWindow], EventWindow]:
    """The groups that are complete before or with this event, and what remains open."""
    complete, window = close(trigger, window, event.sent_at)
    last = max(event.sent_at, window.last_at or event.sent_at)
    first = window.first_at or event.sent_at
    if trigger.mode is EventMode.DEBOUNCE:
        window = EventWindow(event_ids=(event.event_id,), first_at=first, last_at=last)
    else:
        window = EventWindow(event_ids=(*window.event_ids, event.event_id), first_at=first, last_at=last)
    if trigger.mode is EventMode.BATCH and len(window.event_ids) == trigger.count:
        return [*complete, window], EventWindow()
    return complete, window


def close(trigger: EventTrigger, window: EventWindow, now: datetime) -> tuple[list[EventWindow], EventWindow]:
    """The group, if its time is over at `now`, and what remains open."""
    due_at = due(trigger, window)
    return ([window], EventWindow()) if due_at is not None and due_at <= now else ([], window)


def due(trigger: EventTrigger, window: EventWindow) -> datetime | None:
    """When the window is complete without a further event. One of single events waits for a run, and not for a time."""
    if trigger.mode is EventMode.EACH:
        return None
    since = window.last_at if trigger.mode is EventMode.DEBOUNCE else window.first_at
    return None if since is None else since + timedelta(seconds=trigger.seconds or 0)


def run_params(
    trigger: EventTrigger, events: Sequence[SentEvent], declared: set[str], given: Mapping[str, object]
) -> dict[str, object]:
    """The parameters of the run for these events: those of the schedule, then what the last event says about the declared ones,
    by name. `payload`, `event` and `events` stand for a whole payload, the last event and all of them."""
    last = events[-1]
    whole: dict[str, object] = {"payload": last.payload, "event": _plain(last)}
    if "events" in declared:
        whole["events"] = [_plain(each) for each in events]
    own = last.payload if isinstance(last.payload, Mapping) else {}
    found = {**whole, **own, **(captured(trigger, last) or {})}
    return {**given, **{name: value for name, value in found.items() if name in declared}}


def check_declared(trigger: EventTrigger, declared: set[str]) -> Iterator[str]:
    """The parameters that the DAG of this trigger lacks."""
    if trigger.mode is EventMode.BATCH and "events" not in declared:
        yield "needs a parameter for its events: declare `events=Param([])`, or use each=True or debounce"


def _plain(event: SentEvent) -> dict[str, object]:
    sent_at = event.sent_at.isoformat().replace("+00:00", "Z")
    return {"id": event.event_id, "name": event.name, "key": event.key, "sent_at": sent_at, "payload": event.payload}


@lru_cache(maxsize=1000)
def _pattern(name: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(name)
    return re.compile(
        "".join(f"(?P<{part}>[^.]+)" if place % 2 else re.escape(part) for place, part in enumerate(parts))
    )


def _at(payload: object, path: str) -> object:
    """The value at a path such as `order.total`; None if there is none."""
    for part in path.split("."):
        if not isinstance(payload, Mapping):
            return None
        payload = payload.get(part)
    return payload


def _fits(payload: object, path: str, wanted: object) -> bool:
    value = _at(payload, path)
    if isinstance(wanted, Mapping):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    choices = wanted if isinstance(wanted, list | tuple) else [wanted]
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices)


def _seconds(what: str, given: str | float | timedelta) -> float:
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise InvalidSchedule(f"{what} {given!r:.40} is not a time: write one such as '5s'")
    try:
        return parse_duration(given).total_seconds() if isinstance(given, str) else float(given)
    except ValueError as error:
        raise InvalidSchedule(f"{what} {given!r}: {error}") from None


def _length(trigger: EventTrigger) -> str:
    length = describe_duration(timedelta(seconds=trigger.seconds or 0))
    return length if length[0].isdigit() else f"1 {length}"


def _check(trigger: EventTrigger) -> None:
    name = trigger.name
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise InvalidSchedule(f"on_event: {str(name)[:40]!r} is not the name of an event")
    names = _PLACEHOLDER.findall(name)
    if len(names) != len(set(names)) or re.search(r"[{}]", _PLACEHOLDER.sub("", name)):
        raise InvalidSchedule(f"on_event: {name!r} must have placeholders such as {{region}}, each once")
    if trigger.mode is not EventMode.EACH:
        seconds = trigger.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise InvalidSchedule(f"on_event({name!r}) with {trigger.mode} needs a time")
        if not 0.01 <= seconds <= LONGEST_WINDOW.total_seconds():
            raise InvalidSchedule(f"on_event({name!r}): {seconds:g} s is not allowed: it must be from 10 ms to a day")
    count = trigger.count
    if trigger.mode is EventMode.BATCH and (
        isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_EVENTS
    ):
        raise InvalidSchedule(f"on_event({name!r}): a group of {count!r:.20} events must have 1 to {MOST_EVENTS:,}")
    if trigger.key is not None and (not isinstance(trigger.key, str) or not 0 < len(trigger.key) <= LONGEST_NAME):
        raise InvalidSchedule(f"on_event({name!r}): key {trigger.key!r:.40} must be a path such as 'order.id'")
    _check_filters(name, trigger.where)


def _check_filters(name: str, where: object) -> None:
    if where is None:
        return
    if not isinstance(where, Mapping) or not 0 < len(where) <= _MOST_FILTERS:
        raise InvalidSchedule(f"on_event({name!r}): where must be a dict of 1 to {_MOST_FILTERS} paths and values")
    for path, wanted in where.items():
        bounds = wanted.values() if isinstance(wanted, Mapping) else ()
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in bounds)
        choices = wanted if isinstance(wanted, list | tuple) else [wanted]
        plain = all(each is None or isinstance(each, str | int | float | bool) for each in choices)
        fits = bool(bounds) and numbers and wanted.keys() <= _BOUNDS if isinstance(wanted, Mapping) else plain
        if not isinstance(path, str) or not path or not fits:
            raise InvalidSchedule(
                f"on_event({name!r}): where {path!r:.40} is {wanted!r:.60}: write a value, a list of values, or"
                " {'min': 1, 'max': 9}"
            )
