"""A service's view of its own health: whether it is alive, whether it can work, and if not, since when and why.

Everything is remembered with its age: answering must never wait for the database or for the service's own loop, least
of all when one of them hangs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from http import HTTPStatus

from prometheus_client import Gauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from evertick.observability import metrics
from evertick.observability.health_endpoint import Answer, Route

# A tick takes milliseconds. Ten seconds is longer than any wait of a healthy one, and shorter than a missed heartbeat
# deadline.
STALLED_SECONDS = 10.0


MOST_REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStatus:
    """One loop at one moment."""

    name: str
    is_essential: bool
    is_ticking: bool
    failures: int
    is_unreachable: bool
    reason: str | None
    failing_since: datetime | None
    latest_success_at: datetime | None
    quiet_seconds: float
    is_stalled: bool
    blocked: str | None


class LoopHealth:
    """Written by one loop, read by others. A reader may see a half-recorded tick: the next read corrects it."""

    def __init__(self, name: str, *, longest_tick_seconds: float = STALLED_SECONDS, is_essential: bool = True) -> None:
        """A loop that is not essential is shown, but does not affect the service's readiness."""
        self.name, self.is_essential = name, is_essential
        self._longest_tick_seconds = longest_tick_seconds
        self._is_ticking = False
        self._failures = 0
        self._is_unreachable = False
        self._reason = ""
        self._failing_since = 0.0
        self._latest_success_at = 0.0
        self._moved = time.monotonic()
        self._quiet_until = self._moved + STALLED_SECONDS
        # Set by a loop whose ticks succeed but cannot do their work, with the reason for people.
        self.blocked: str | None = None

    def begin(self) -> None:
        """A tick begins, or a long one reports progress."""
        self._moved = time.monotonic()
        self._quiet_until = self._moved + self._longest_tick_seconds
        self._is_ticking = True

    def succeed(self, delay: float) -> None:
        """The tick ended, and the next one is due after `delay` seconds."""
        self._failures = 0
        self._latest_success_at = time.time()
        self._rest(delay)

    def fail(self, error: BaseException, *, is_unreachable: bool, delay: float) -> None:
        """`is_unreachable`: the database or the network did not answer, as opposed to an error in the tick."""
        if self._failures == 0:
            self._failing_since = time.time()
        self._reason, self._is_unreachable = _text(error), is_unreachable
        self._failures += 1
        self._rest(delay)

    def look(self) -> LoopStatus:
        failures, now = self._failures, time.monotonic()
        is_failing = failures > 0
        return LoopStatus(
            name=self.name,
            is_essential=self.is_essential,
            is_ticking=self._is_ticking,
            failures=failures,
            is_unreachable=is_failing and self._is_unreachable,
            reason=self._reason if is_failing else None,
            failing_since=_instant(self._failing_since) if is_failing else None,
            latest_success_at=_instant(self._latest_success_at) if self._latest_success_at else None,
            quiet_seconds=now - self._moved,
            is_stalled=now > self._quiet_until,
            blocked=self.blocked,
        )

    def _rest(self, delay: float) -> None:
        self._moved = time.monotonic()
        self._quiet_until = self._moved + max(delay, 0.0) + STALLED_SECONDS
        self._is_ticking = False


_PULSES: dict[str, LoopHealth] = {}


@contextmanager
def track(pulse: LoopHealth) -> Iterator[LoopHealth]:
    """Within the block, `look_at_all` returns the loop, too."""
    _PULSES[pulse.name] = pulse
    try:
        yield pulse
    finally:
        if _PULSES.get(pulse.name) is pulse:
            del _PULSES[pulse.name]


def all_loops() -> list[LoopStatus]:
    # Copied in one step: loops of other threads come and go meanwhile.
    return [pulse.look() for pulse in list(_PULSES.values())]


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _text(error: BaseException) -> str:
    """Only the first line: the details below it may quote a row."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= MOST_REASON_CHARACTERS else text[: MOST_REASON_CHARACTERS - 3] + "..."


HEALTHY, UNHEALTHY = "healthy", "unhealthy"


# Loops that query the database in every tick. The others may have no reason to: a runner whose slots are all taken.
_CONTACTS = {"start", "watch", "scheduler", "heartbeat"}


# Services that query the database only to answer a request.
_QUIET = {"api"}


Document = dict[str, object]


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthProblem:
    """One reason why the service cannot do its work."""

    reason: str
    since: datetime


class Health:
    """`service` is also the name of its main loop: once that has ticked, the service is at work."""

    def __init__(self, service: str, *, owner: str, look: Callable[[], list[LoopStatus]] = all_loops) -> None:
        self.service, self.owner = service, owner
        self.phase = Phase.STARTING
        self._started_at = _now()
        self._look = look

    def complaints(self) -> list[HealthProblem]:
        """Empty when the service can work."""
        return self._complaints(self._look())

    def _complaints(self, seen: list[LoopStatus]) -> list[HealthProblem]:
        found = _distinct([each for loop in seen if _has_a_say(loop) and (each := _complaint(loop))])
        main = next((loop for loop in seen if loop.name == self.service), None)
        if self.phase is Phase.STOPPING:
            found.insert(0, HealthProblem(reason="stopping", since=_now()))
        elif not found and (main is None or main.latest_success_at is None):
            found.append(HealthProblem(reason="starting", since=self._started_at))
        return found

    def document(self) -> Document:
        """The response of /monitor/health."""
        seen = self._look()
        complaints = self._complaints(seen)
        main = next((loop for loop in seen if loop.name == self.service), None)
        database = database_document(seen, is_quiet=self.service in _QUIET)
        return {
            "status": HEALTHY if not complaints and database["status"] == HEALTHY else UNHEALTHY,
            "service": self.service,
            "owner": self.owner,
            "pid": os.getpid(),
            "phase": self.phase.value,
            "started_at": iso(self._started_at),
            "metadatabase": database,
            self.service: {
                "status": UNHEALTHY if complaints else HEALTHY,
                "latest_heartbeat": iso(main.latest_success_at) if main else None,
                **_troubles(complaints),
                **_figures(self.service),
            },
            "loops": {loop.name: _loop_document(loop) for loop in seen},
        }

    def routes(self) -> dict[str, Route]:
        return {
            "/healthz": alive,
            "/readyz": self._readyz,
            "/monitor/health": self._monitor,
            "/metrics": _metrics,
        }

    async def _readyz(self) -> Answer:
        return readiness(self.service, [each.reason for each in self.complaints()])

    async def _monitor(self) -> Answer:
        return json_answer(self.document())


def database_document(seen: list[LoopStatus], *, is_quiet: bool = False) -> Document:
    """The database as the loops see it: when it last answered one of them, or since when it does not.

    `is_quiet`: the service queries only on request, so no contact is not a problem.
    """
    latest = max((loop.latest_success_at for loop in _contacts(seen) if loop.latest_success_at), default=None)
    document: Document = {"status": HEALTHY, "latest_contact": iso(latest)}
    away = [loop for loop in seen if _has_a_say(loop) and loop.is_unreachable and loop.failing_since]
    silent = [loop for loop in _contacts(seen) if loop.is_stalled and loop.is_ticking]
    if away:
        first = min(away, key=lambda loop: loop.failing_since or _now())
        return document | {"status": UNHEALTHY, "since": iso(first.failing_since), "reason": first.reason}
    if silent:
        longest = max(loop.quiet_seconds for loop in silent)
        since = iso(_now() - timedelta(seconds=longest))
        return document | {"status": UNHEALTHY, "since": since, "reason": f"no answer for {longest:.0f} s"}
    if latest is None and not is_quiet:
        return document | {"status": UNHEALTHY, "reason": "no contact yet"}
    return document


def json_answer(document: Document, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    body = json.dumps(document, indent=2) + "\n"
    return Answer(status=status, content_type="application/json", body=body.encode())


def readiness(service: str, reasons: list[str]) -> Answer:
    """The response of /readyz."""
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return json_answer({"service": service, "ready": not reasons, "reasons": reasons}, status)


def iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metrics_text() -> bytes:
    return generate_latest(metrics.REGISTRY)


def metrics_answer(text: bytes) -> Answer:
    return Answer(content_type=CONTENT_TYPE_PLAIN_0_0_4, body=text)


def _has_a_say(loop: LoopStatus) -> bool:
    return loop.is_essential or loop.name in _CONTACTS


def _contacts(seen: list[LoopStatus]) -> list[LoopStatus]:
    return [loop for loop in seen if loop.name in _CONTACTS]


def _complaint(loop: LoopStatus) -> HealthProblem | None:
    if loop.is_stalled:
        since = _now() - timedelta(seconds=loop.quiet_seconds)
        return HealthProblem(reason=f"loop {loop.name} has not ticked for {loop.quiet_seconds:.0f} s", since=since)
    if loop.failing_since and loop.is_unreachable:
        return HealthProblem(reason=f"database unreachable: {loop.reason}", since=loop.failing_since)
    if loop.failing_since:
        return HealthProblem(reason=f"loop {loop.name} is failing: {loop.reason}", since=loop.failing_since)
    if loop.blocked:
        return HealthProblem(reason=loop.blocked, since=_now())
    return None


def _distinct(complaints: list[HealthProblem]) -> list[HealthProblem]:
    """Each reason once, the oldest: in an outage all loops report the same."""
    found: dict[str, HealthProblem] = {}
    for each in sorted(complaints, key=lambda complaint: complaint.since):
        found.setdefault(each.reason, each)
    return list(found.values())


def _troubles(complaints: list[HealthProblem]) -> Document:
    if not complaints:
        return {}
    return {"since": iso(min(each.since for each in complaints)), "reasons": [each.reason for each in complaints]}


def _figures(service: str) -> Document:
    """The gauges that operators need first."""
    match service:
        case "scheduler":
            led = _led_shards()
            role: Document = {"role": "leader" if value_of(metrics.LEADER) or led else "standby"}
            return role | ({"shards": led} if led not in ([], [0]) else {})
        case "runner":
            return {"running": int(value_of(metrics.RUNNING)), "slots": int(value_of(metrics.SLOTS))}
        case _:
            return {}


def _led_shards() -> list[int]:
    samples = [sample for family in metrics.SHARD_LEADER.collect() for sample in family.samples]
    return sorted(int(sample.labels["shard"]) for sample in samples if sample.value)


def _loop_document(loop: LoopStatus) -> Document:
    document: Document = {
        "status": "stalled" if loop.is_stalled else "failing" if loop.failures else HEALTHY,
        "latest_success": iso(loop.latest_success_at),
        "quiet_seconds": round(loop.quiet_seconds, 3),
    }
    if loop.blocked:
        document |= {"warning": loop.blocked}
    if loop.failures:
        document |= {"failures": loop.failures, "since": iso(loop.failing_since), "reason": loop.reason}
    return document


def value_of(gauge: Gauge) -> float:
    return next((sample.value for family in gauge.collect() for sample in family.samples), 0.0)


async def alive() -> Answer:
    return Answer(body=b"alive\n")


async def _metrics() -> Answer:
    return metrics_answer(metrics_text())


def _now() -> datetime:
    return datetime.now(UTC)
