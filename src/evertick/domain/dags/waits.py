"""Waits that need no slot: a time, a time of day, an event, an approval, or a condition that is polled."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from evertick.domain.access import Role
from evertick.domain.dags.gates import check_template, paths_of
from evertick.domain.dags.params import ParamSpec
from evertick.domain.schedules.spec import ScheduleSpec, next_after, parse_schedule

LONGEST_NAME = 200
LONGEST_WAIT_SECONDS = 10 * 365 * 86_400.0
SHORTEST_INTERVAL_SECONDS, LONGEST_INTERVAL_SECONDS = 1.0, 7 * 86_400.0
LARGEST_BACKOFF = 10.0
MOST_PAYLOAD_BYTES = 64 * 1024
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")


class WaitKind(StrEnum):
    """`POLL` is a function that runners call repeatedly; the other kinds never run on a runner."""

    TIME = "time"
    CLOCK = "clock"
    EVENT = "event"
    APPROVAL = "approval"
    POLL = "poll"


class TimeoutAction(StrEnum):
    """How a task ends when its wait timed out or its approval was rejected."""

    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpec:
    """`seconds`: the duration, or the poll interval. `until`: an instant, or a time of day. `name`: the event's name, or the
    approval's title; it may use parameters of the run. `lookback_seconds`: how long before its run an event may have been sent."""

    kind: WaitKind
    seconds: float | None = None
    until: str | None = None
    name: str | None = None
    timeout_seconds: float | None = None
    on_timeout: TimeoutAction = TimeoutAction.FAIL
    on_reject: TimeoutAction = TimeoutAction.FAIL
    backoff: float = 1.0
    longest_seconds: float | None = None
    lookback_seconds: float = 0.0
    form: tuple[ParamSpec, ...] = ()
    approvers: Role | None = None


def check_wait(wait: WaitSpec, params: Collection[str]) -> Iterator[str]:
    """The problems with a wait. `params` are the names that its DAG declares."""
    if wait.name is not None:
        yield from _check_name("event" if wait.kind is WaitKind.EVENT else "title", wait.name, params)
    for what, seconds in (("timeout", wait.timeout_seconds), ("lookback", wait.lookback_seconds or None)):
        if seconds is not None and not 0 < seconds <= LONGEST_WAIT_SECONDS:
            yield f"{what} is {seconds:g} s; it must be more than 0 and at most ten years, or omitted."
    if wait.kind is WaitKind.POLL:
        yield from _check_poll(wait)
    elif wait.seconds is not None and not 0 <= wait.seconds <= LONGEST_WAIT_SECONDS:
        yield f"it waits for {wait.seconds:g} s; at most ten years are allowed."


def _check_name(what: str, name: str, params: Collection[str]) -> Iterator[str]:
    if problem := check_event_name(name):
        yield f"{what} {name!r}: {problem}."
        return
    yield from check_template(f"{what} {name!r}", lambda: paths_of(name), params)


def _check_poll(wait: WaitSpec) -> Iterator[str]:
    if not SHORTEST_INTERVAL_SECONDS <= (wait.seconds or 0) <= LONGEST_INTERVAL_SECONDS:
        yield f"interval is {wait.seconds:g} s; it must be from 1 second to 7 days."
    if not 1 <= wait.backoff <= LARGEST_BACKOFF:
        yield f"backoff is {wait.backoff:g}; it must be from 1 (none) to {LARGEST_BACKOFF:g}."
    if wait.longest_seconds is not None and not (wait.seconds or 0) <= wait.longest_seconds <= LONGEST_INTERVAL_SECONDS:
        yield f"max_interval is {wait.longest_seconds:g} s; it must be from the interval to 7 days."


def check_event_name(name: object) -> str | None:
    """The problem with an event's name, or None."""
    if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable() and name.strip() == name:
        return None
    return f"it must be 1 to {LONGEST_NAME} printable characters without spaces around them"


def read_clock(text: str) -> str | None:
    """A time of day, as `08:00:00`; None for any other text."""
    if (found := _CLOCK.fullmatch(text.strip())) is None:
        return None
    hour, minute, second = found.groups()
    return f"{int(hour):02}:{minute}:{second or '00'}"


def clock_instant(at: str, timezone: str, since: datetime) -> datetime:
    """The first time at or after `since` that a clock in the zone shows `at`, by the rules of schedules (DST included)."""
    hour, minute, second = (int(part) for part in at.split(":"))
    plain: ScheduleSpec = parse_schedule(f"{second} {minute} {hour} * * *", timezone=timezone)
    found = next_after(plain, since.astimezone(UTC) - timedelta(microseconds=1))
    assert found is not None
    return found
