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
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from http import HTTPStatus

from prometheus_client import Gauge
from prometheus_client.exposition import generate_latest

from evertick.observability import metrics
from evertick.observability.health_endpoint import EndpointResponse, Route

# A tick takes milliseconds. Ten seconds is longer than any wait of a healthy one, and shorter than a missed heartbeat
# deadline.
STALLED_SECONDS = 10.0

MOST_REASON_CHARACTERS = 500

# The format of `generate_latest`. The library has no name for it before 0.22.
_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class LoopHealth:
    """Written by one loop, read by others. A reader may see a half-recorded tick: the next read corrects it."""

    def __init__(self, name: str, *, longest_tick_seconds: float = STALLED_SECONDS, is_essential: bool = True) -> None:
        """A loop that is not essential is shown, but does not affect the service's readiness."""
        self.name, self.is_essential = name, is_essential
        self._longest_tick_seconds = longest_tick_seconds
        self._moved = time.monotonic()
        self._quiet_until = self._moved + STALLED_SECONDS
        self.is_ticking = self.is_unreachable = False
        self.failures = 0
        self.reason: str | None = None
        self.failing_since: datetime | None = None
        self.latest_success_at: datetime | None = None
        # Set by a loop whose ticks succeed but cannot do their work, with the reason for people.
        self.blocked: str | None = None

    @property
    def quiet_seconds(self) -> float:
        return time.monotonic() - self._moved

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() > self._quiet_until

    def begin(self) -> None:
        """A tick begins, or a long one reports progress."""
        self._moved = time.monotonic()
        self._quiet_until = self._moved + self._longest_tick_seconds
        self.is_ticking = True

    def succeed(self, delay: float) -> None:
        """The tick ended, and the next one is due after `delay` seconds."""
        self.failures, self.is_unreachable, self.reason, self.failing_since = 0, False, None, None
        self.latest_success_at = _now()
        self._rest(delay)

    def fail(self, error: BaseException, *, is_unreachable: bool, delay: float) -> None:
        """`is_unreachable`: the database or the network did not answer, as opposed to an error in the tick."""
        self.failing_since = self.failing_since or _now()
        self.reason, self.is_unreachable = _text(error), is_unreachable
        self.failures += 1
        self._rest(delay)

    def _rest(self, delay: float) -> None:
        self._moved = time.monotonic()
        self._quiet_until = self._moved + max(delay, 0.0) + STALLED_SECONDS
        self.is_ticking = False


_PULSES: dict[str, LoopHealth] = {}


@contextmanager
def track(pulse: LoopHealth) -> Iterator[LoopHealth]:
    """Within the block, `all_loops` returns the loop, too."""
    _PULSES[pulse.name] = pulse
    try:
        yield pulse
    finally:
        if _PULSES.get(pulse.name) is pulse:
            del _PULSES[pulse.name]


def all_loops() -> list[LoopHealth]:
    """Each at one moment: copies, because loops of other threads come, go and tick meanwhile."""
    return [copy(pulse) for pulse in list(_PULSES.values())]


def _text(error: BaseException) -> str:
    """Only the first line: the details below it may quote a row."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= MOST_REASON_CHARACTERS else text[: MOST_REASON_CHARACTERS - 3] + "..."


HEALTHY, UNHEALTHY = "healthy", "unhealthy"


# Loops that query the database in every tick. The others may have no reason to: a runner whose slots are all taken.
_CONTACTS = {"start", "watch", "scheduler", "heartbeat", "launcher"}


# Services that query the database only to answer a request.
_QUIET = {"api"}


Document = dict[str, object]


class ServicePhase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthProblem:
    """One reason why the service cannot do its work."""

    reason: str
    since: datetime


class ServiceHealth:
    """`service` is also the name of its main loop: once that has ticked, the service is at work."""

    def __init__(self, service: str, *, owner: str, look: Callable[[], list[LoopHealth]] = all_loops) -> None:
        self.service, self.owner = service, owner
        self.phase = ServicePhase.STARTING
        self._started_at = _now()
        self._look = look

    def complaints(self, seen: list[LoopHealth] | None = None) -> list[HealthProblem]:
        """Empty when the service can work."""
        seen = self._look() if seen is None else seen
        found = _distinct([each for loop in seen if _has_a_say(loop) and (each := _complaint(loop))])
        main = next((loop for loop in seen if loop.name == self.service), None)
        if self.phase is ServicePhase.STOPPING:
            found.insert(0, HealthProblem(reason="stopping", since=_now()))
        elif not found and (main is None or main.latest_success_at is None):
            found.append(HealthProblem(reason="starting", since=self._started_at))
        return found

    def document(self) -> Document:
        """The response of /monitor/health."""
        seen = self._look()
        complaints = self.complaints(seen)
        main = next((loop for loop in seen if loop.name == self.service), None)
        database = database_document(seen, is_quiet=self.service in _QUIET)
        is_well = not complaints and database["status"] == HEALTHY
        return {
            **service_document(self.service, self.owner, self.phase, self._started_at, is_well=is_well),
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
        return health_routes(readyz=self._readyz, monitor=self._monitor, metrics=_metrics)

    async def _readyz(self) -> EndpointResponse:
        return readiness(self.service, [each.reason for each in self.complaints()])

    async def _monitor(self) -> EndpointResponse:
        return json_answer(self.document())


def service_document(service: str, owner: str, phase: ServicePhase, started_at: datetime, *, is_well: bool) -> Document:
    status, began = HEALTHY if is_well else UNHEALTHY, iso(started_at)
    process = {"service": service, "owner": owner, "pid": os.getpid(), "phase": phase.value, "started_at": began}
    return {"status": status, **process}


def database_document(seen: list[LoopHealth], *, is_quiet: bool = False) -> Document:
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


def json_answer(document: Document, status: HTTPStatus = HTTPStatus.OK) -> EndpointResponse:
    body = json.dumps(document, indent=2) + "\n"
    return EndpointResponse(status=status, content_type="application/json", body=body.encode())


def readiness(service: str, reasons: list[str]) -> EndpointResponse:
    """The response of /readyz."""
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return json_answer({"service": service, "ready": not reasons, "reasons": reasons}, status)


def iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metrics_text() -> bytes:
    return generate_latest(metrics.REGISTRY)


def metrics_answer(text: bytes) -> EndpointResponse:
    return EndpointResponse(content_type=_PROMETHEUS_TEXT, body=text)


def _has_a_say(loop: LoopHealth) -> bool:
    return loop.is_essential or loop.name in _CONTACTS


def _contacts(seen: list[LoopHealth]) -> list[LoopHealth]:
    return [loop for loop in seen if loop.name in _CONTACTS]


def _complaint(loop: LoopHealth) -> HealthProblem | None:
    if loop.is_stalled:
        since = _now() - timedelta(seconds=loop.quiet_seconds)
        return HealthProblem(reason=f"loop {loop.name} has not ticked for {loop.quiet_seconds:.0f} s", since=since)
    if loop.failing_since:
        what = "database unreachable" if loop.is_unreachable else f"loop {loop.name} is failing"
        return HealthProblem(reason=f"{what}: {loop.reason}", since=loop.failing_since)
    return HealthProblem(reason=loop.blocked, since=_now()) if loop.blocked else None


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


def _loop_document(loop: LoopHealth) -> Document:
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


def health_routes(*, readyz: Route, monitor: Route, metrics: Route) -> dict[str, Route]:
    return {"/healthz": _alive, "/readyz": readyz, "/monitor/health": monitor, "/metrics": metrics}


async def _alive() -> EndpointResponse:
    return EndpointResponse(body=b"alive\n")


async def _metrics() -> EndpointResponse:
    return metrics_answer(metrics_text())


def _now() -> datetime:
    return datetime.now(UTC)
