"""What was done to the system and what its clients saw, as JSON lines: the nemesis log and the client log.

Written by the harness only. Each line is one write, so that several processes may append to one file and a killed writer
costs at most its last line. What a fault excuses is decided here and nowhere else.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.chaos.usage import usage_of

Json = dict[str, Any]

_PLANNING, _RUNNING = "planning", "running"
_BOTH = (_PLANNING, _RUNNING)


def boot_ns() -> int:
    """The one clock of all evidence: never set, the same for every process, and it counts while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Fault(StrEnum):
    """Kinds of faults. Parameters say how much of it."""

    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    ONE_WAY = "one_way"
    RESET = "reset"
    REFUSE = "refuse"
    DELAY = "delay"
    THROTTLE = "throttle"
    DROP_REPLY = "drop_reply"
    TERMINATE = "terminate"
    FAILPOINT = "failpoint"
    RESTART = "restart"
    OUTAGE = "outage"
    FAILOVER = "failover"
    LOCK = "lock"
    CROWD = "crowd"
    STOP = "stop"
    UPGRADE = "upgrade"
    OVERLAP = "overlap"
    OUT_OF_MEMORY = "out_of_memory"
    BODY = "body"
    CLOCK = "clock"
    DISK_FULL = "disk_full"
    POISON = "poison"
    RETRY_STORM = "retry_storm"
    EDITS = "edits"
    FLOOD = "flood"
    SPIKE = "spike"
    STALE_WRITER = "stale_writer"
    ERRORS = "errors"
    REMOVED = "removed"


# What runs tasks, and what these and their agents need beside the database: planning must not feel what is done to them.
_OUTSIDE_PLANNING = ("runner", "et-", "agents", "api", "kubernetes")
# Those that hold attempts: runners, and agents by the names of their attempts.
_HOLDERS = ("runner", "et-")
# Whoever meets one of these can say nothing to the database while it lasts.
SILENCING = frozenset({Fault.FREEZE, Fault.CUT, Fault.ONE_WAY, Fault.REFUSE})
# These must not be felt by anybody else, so they excuse nothing, whatever they are done to.
UNFELT = frozenset(
    {
        Fault.CLOCK,
        Fault.DISK_FULL,
        Fault.POISON,
        Fault.RETRY_STORM,
        Fault.EDITS,
        Fault.FLOOD,
        Fault.STALE_WRITER,
        Fault.BODY,
    }
)


class Phase(StrEnum):
    """Where the run stands: idle (the baseline), under load, no new work, no more faults, idle again, evidence is read."""

    IDLE = "idle"
    LOAD = "load"
    STOPPED = "stopped"
    HEALED = "healed"
    READ = "read"


class Answer(StrEnum):
    """OK: acknowledged. ERROR: surely not done. UNKNOWN: either."""

    OK = "ok"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultWindow:
    """One fault, from begin to end. `stop_ns` is the end of the record where nobody ended it."""

    number: int
    kind: Fault
    target: str
    start_ns: int
    stop_ns: int
    disturbs: tuple[str, ...]
    parameters: Json = field(default_factory=dict)

    @property
    def silences(self) -> str | None:
        """The runner or agent that cannot report meanwhile. An outage of the database silences nobody: no one is reaped for it."""
        return self.target if self.kind in SILENCING and self.target.startswith(_HOLDERS) else None

    @property
    def recovered_seconds(self) -> float | None:
        return self.parameters.get("recovered_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLife:
    """One process of a service. No end: it was alive when the evidence was read."""

    service: str
    pid: int
    start_ns: int
    exit_ns: int | None
    status: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Something that an executor elsewhere had under the name of an attempt. No end: it was there when the evidence was read."""

    name: str
    start_ns: int
    stop_ns: int | None

    def is_there(self, at_ns: int, slack_ns: int) -> bool:
        """Whether it was surely there: not just made, and not taken away just then."""
        return self.start_ns + slack_ns <= at_ns and (self.stop_ns is None or at_ns + slack_ns <= self.stop_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process uses, with its threads and descendants. `phase` is the one it was taken in."""

    service: str
    pid: int
    at_ns: int
    fds: int
    threads: int
    children: int
    rss_kb: int
    connections: int | None
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalSample:
    """What the whole installation uses: sessions in the database, and processes that nobody owns any more."""

    at_ns: int
    connections: int
    strays: int
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nemesis:
    """Everything that the nemesis log says."""

    faults: tuple[FaultWindow, ...] = ()
    lives: tuple[ProcessLife, ...] = ()
    phases: tuple[tuple[str, int], ...] = ()
    samples: tuple[Sample, ...] = ()
    totals: tuple[TotalSample, ...] = ()
    placements: tuple[Placement, ...] = ()

    def phase_ns(self, name: Phase) -> int | None:
        """When that phase began, the last time."""
        return next((at for phase, at in reversed(self.phases) if phase == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request. `answered_ns` is missing where no answer came."""

    op: str
    request: str
    asked_ns: int
    answered_ns: int | None
    answer: Answer
    detail: Json


class _Lines:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, what: str, **fields: Any) -> None:
        record = {"what": what, "at_ns": boot_ns(), "wall_ns": time.time_ns(), **fields}
        os.write(self._file, json.dumps(record, default=str, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class NemesisLog:
    """Writes the nemesis log."""

    def __init__(self, path: Path) -> None:
        self._lines = _Lines(path)
        self._numbers = itertools.count(os.getpid() * 1_000_000)
        self._phase = Phase.IDLE

    def began(self, kind: Fault, target: str, *, disturbs: Iterable[str] | None = None, **parameters: Any) -> int:
        """Returns the fault's number, for `ended`."""
        number = next(self._numbers)
        excused = tuple(disturbs) if disturbs is not None else disturbed_by(kind, target)
        self._lines.write("began", number=number, kind=kind, target=target, disturbs=excused, parameters=parameters)
        return number

    def ended(self, number: int, **parameters: Any) -> None:
        self._lines.write("ended", number=number, parameters=parameters)

    def instant(self, kind: Fault, target: str, *, disturbs: Iterable[str] | None = None, **parameters: Any) -> int:
        """A fault that is over at once. `ended` may be told more about it later without making it longer."""
        number = self.began(kind, target, disturbs=disturbs, **parameters)
        self.ended(number)
        return number

    def started(self, service: str, pid: int) -> None:
        self._lines.write("started", service=service, pid=pid)

    def exited(self, service: str, pid: int, status: int | None, *, at_ns: int | None = None) -> None:
        """`at_ns`: the end as it was seen, where that was before now."""
        self._lines.write("exited", service=service, pid=pid, status=status, **({"at_ns": at_ns} if at_ns else {}))

    def placed(self, name: str) -> None:
        """An executor elsewhere has something under the name of an attempt."""
        self._lines.write("placed", name=name)

    def displaced(self, name: str) -> None:
        """Nothing of it is left there."""
        self._lines.write("displaced", name=name)

    def phase(self, name: Phase) -> None:
        self._phase = name
        self._lines.write("phase", name=name)

    def sample(self, service: str, pid: int, *, connections: int | None = None) -> bool:
        """Whether the process was there to be looked at."""
        usage = usage_of(pid)
        if usage is None:
            return False
        self._lines.write("sample", service=service, pid=pid, connections=connections, phase=self._phase, **usage)
        return True

    def sample_total(self, *, connections: int, strays: int) -> None:
        self._lines.write("total", connections=connections, strays=strays, phase=self._phase)

    def close(self) -> None:
        self._lines.close()


class ClientLog:
    """Writes the client log."""

    def __init__(self, path: Path) -> None:
        self._lines = _Lines(path)

    def asked(self, op: str, *, request: str, **detail: Any) -> None:
        self._lines.write("asked", op=op, request=request, detail=detail)

    def answered(self, request: str, answer: Answer, **detail: Any) -> None:
        self._lines.write("answered", request=request, answer=answer, detail=detail)

    def close(self) -> None:
        self._lines.close()


def disturbed_by(kind: Fault, target: str) -> tuple[str, ...]:
    """What a fault may delay: planning (fires, ticks), running (starts of bodies, ends of runs), both or nothing."""
    if kind in UNFELT:
        return ()
    return (_RUNNING,) if target.startswith(_OUTSIDE_PLANNING) else _BOTH
