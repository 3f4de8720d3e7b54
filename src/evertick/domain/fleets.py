"""Fleets of runners that a launcher starts on an engine: what their file says, and how many runners a fleet needs now.

Pure. A fleet grows at once, and shrinks when it has needed fewer runners for its whole idle time: a burst with pauses
neither starts nor ends runners in each of them.
"""

from __future__ import annotations

import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Any

from evertick.domain.durations import parse_duration
from evertick.domain.engine_options import ENGINE_OPTIONS, check_engine_options, slurm_seconds
from evertick.domain.errors import InvalidSettings, UserError, did_you_mean
from evertick.domain.executor_options import pod_patch
from evertick.domain.routing import check_queue

MOST_RUNNERS, MOST_SLOTS, MOST_FLEETS = 1000, 10_000, 100
IDLE_SECONDS, LIFETIME_SECONDS = 300.0, 86_400.0
# As many more runners than were needed stay: without, a simulated wave of tasks reversed the size four times a burst.
SPARE_SHARE = 0.25
# A job with a time limit stops taking work before it, for a tenth of the limit, so that its tasks can end.
_SHARE_FOR_TASKS = 0.1
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")
# The engines without options of ours: runners as processes of the launcher's machine.
_PLAIN_ENGINES = ("process", "kubernetes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`lifetime_seconds`: how long each runner takes new work. `options`: those of the engine."""

    name: str
    queues: tuple[str, ...]
    engine: str
    most: int
    least: int = 0
    slots: int = 8
    idle_seconds: float = IDLE_SECONDS
    lifetime_seconds: float = LIFETIME_SECONDS
    options: Mapping[str, object] = field(default_factory=dict)


# The file


def read_fleets(text: str) -> tuple[Fleet, ...]:
    """One table for each fleet. The InvalidSettings says what is wrong, and where."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSettings(f"it is not valid TOML: {error}") from None
    if not tables or len(tables) > MOST_FLEETS:
        raise InvalidSettings(f"it must have 1 to {MOST_FLEETS} tables, one for each fleet, such as [gpu]")
    fleets = tuple(_fleet(name, table) for name, table in tables.items())
    serving: dict[str, str] = {}
    for fleet in fleets:
        for queue in fleet.queues:
            if (other := serving.setdefault(queue, fleet.name)) != fleet.name:
                raise InvalidSettings(
                    f"the fleets {other!r} and {fleet.name!r} both serve queue {queue!r}: each would start runners for its"
                    " tasks. Give it to one of them"
                )
    return fleets


def _fleet(name: str, table: object) -> Fleet:
    if not _NAME.fullmatch(name):
        raise InvalidSettings(f"{name!r:.100} is no name of a fleet: use up to 24 of a-z, 0-9 and '-'")
    if not isinstance(table, dict):
        raise InvalidSettings(f"{name!r} must be a table: write [{name}]")
    try:
        return _read(name, table)
    except (TypeError, ValueError, UserError) as error:
        raise InvalidSettings(f"fleet {name!r}: {str(error).rstrip('.')}") from None


_KEYS = ("engine", "queues", "min", "max", "slots", "idle", "lifetime", "options")


def _read(name: str, table: Mapping[str, Any]) -> Fleet:
    if unknown := sorted(table.keys() - set(_KEYS)):
        hint = did_you_mean(unknown[0], _KEYS, f"known: {', '.join(_KEYS)}")
        raise ValueError(f"it has no {unknown[0]!r}; {hint}")
    engines = (*ENGINE_OPTIONS, *_PLAIN_ENGINES)
    if (engine := table.get("engine")) not in engines:
        raise ValueError(f"its engine is {engine!r:.100}: use {', '.join(engines)}")
    queues = table.get("queues", [name])
    if not isinstance(queues, list) or not queues or not all(isinstance(each, str) for each in queues):
        raise TypeError('queues must be a list of names, as in ["gpu"]')
    least, most = _whole(table, "min", 0, at_least=0), _whole(table, "max", None, at_least=1)
    if not least <= most <= MOST_RUNNERS:
        raise ValueError(f"min is {least} and max is {most}: min must be at most max, and max at most {MOST_RUNNERS}")
    options = table.get("options", {})
    if not isinstance(options, dict):
        raise TypeError(f"options must be a table: write [{name}.options]")
    _check_options(str(engine), options)
    limit = slurm_seconds(options["time"]) if engine == "slurm" and "time" in options else None
    lifetime = _seconds(table, "lifetime", LIFETIME_SECONDS if limit is None else (1 - _SHARE_FOR_TASKS) * limit)
    if limit is not None and lifetime >= limit:
        raise ValueError(f"its lifetime of {lifetime:g} s must be below the time limit of its jobs, {limit:g} s")
    return Fleet(
        name=name,
        queues=tuple(dict.fromkeys(check_queue(each) for each in queues)),
        engine=str(engine),
        least=least,
        most=most,
        slots=_whole(table, "slots", 8, at_least=1, at_most=MOST_SLOTS),
        idle_seconds=_seconds(table, "idle", IDLE_SECONDS),
        lifetime_seconds=lifetime,
        options=options,
    )


def _check_options(engine: str, options: Mapping[str, object]) -> None:
    if engine in ENGINE_OPTIONS:
        check_engine_options(engine, options)
    elif engine == "kubernetes":
        pod_patch(dict(options))
    elif options:
        raise ValueError(f"{engine} has no options")


def _whole(table: Mapping[str, Any], key: str, default: int | None, *, at_least: int, at_most: int = 10**6) -> int:
    value = table.get(key, default)
    if value is None:
        raise ValueError(f"it needs {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        raise ValueError(f"{key} is {value!r:.100}: it must be a whole number from {at_least} to {at_most}")
    return value


def _seconds(table: Mapping[str, Any], key: str, default: float) -> float:
    if key not in table:
        return default
    try:
        seconds = parse_duration(str(table[key])).total_seconds()
    except ValueError as error:
        raise ValueError(f"{key} is {table[key]!r:.100}: {error}") from None
    if seconds < 1:
        raise ValueError(f"{key} is {table[key]!r:.100}: it must be at least a second")
    return seconds


# The decision


class PilotState(StrEnum):
    """`STARTING`: its object exists or is about to, and no runner has joined. `DRAINING`: it takes no new work."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """One launched runner, as the decision sees it."""

    name: str
    state: PilotState
    busy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`desired`: the number of runners that the load needs. `start`: how many more. `drain`: which are too many."""

    desired: int
    start: int
    drain: tuple[str, ...]


def desired_runners(fleet: Fleet, *, queued: int, running: int) -> int:
    return min(max(ceil((queued + running) / fleet.slots), fleet.least), fleet.most)


class Scaler:
    """Of one fleet, for as long as one launcher leads it. `now` is in seconds of any steady clock. A new one drains
    nothing before it has observed a whole idle time."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self._fleet, self._began_at = fleet, now
        # Falling: what was needed at a time, without what a later and larger need makes irrelevant.
        self._peaks: deque[tuple[float, int]] = deque()

    def plan(self, pilots: Sequence[Pilot], *, queued: int, running: int, now: float) -> Plan:
        fleet = self._fleet
        desired = desired_runners(fleet, queued=queued, running=running)
        while self._peaks and self._peaks[-1][1] <= desired:
            self._peaks.pop()
        self._peaks.append((now, desired))
        while self._peaks[0][0] < now - fleet.idle_seconds:
            self._peaks.popleft()
        staying = [each for each in pilots if each.state is not PilotState.DRAINING]
        room = fleet.most - len(pilots)
        peak = self._peaks[0][1]
        surplus = len(staying) - peak if now - self._began_at >= fleet.idle_seconds else 0
        if peak > fleet.least and surplus <= SPARE_SHARE * len(staying):
            # A need that varies a little would start and end a runner each time. One that is idle leaves by itself.
            surplus = 0
        # Those first that never began, then those with the least to finish.
        order = sorted(staying, key=lambda each: (each.state is PilotState.RUNNING, each.busy, each.name))
        return Plan(
            desired=desired,
            start=max(0, min(desired - len(staying), room)),
            drain=tuple(each.name for each in order[: max(0, surplus)]),
        )
