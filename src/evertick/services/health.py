"""A service's view of its own health: whether it is alive, whether it can work, and if not, since when and why.

Everything is remembered with its age: answering must never wait for the database or for the service's own loop, least
of all when one of them hangs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from http import HTTPStatus

from prometheus_client import Gauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from evertick.services import metrics
from evertick.services.http_port import Answer, Route
from evertick.services.pulse import Seen, look_at_all

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
class Complaint:
    """One reason why the service cannot do its work."""

    reason: str
    since: datetime


class Health:
    """`service` is also the name of its main loop: once that has ticked, the service is at work."""

    def __init__(self, service: str, *, owner: str, look: Callable[[], list[Seen]] = look_at_all) -> None:
        self.service, self.owner = service, owner
        self.phase = Phase.STARTING
        self._started_at = _now()
        self._look = look

    def complaints(self) -> list[Complaint]:
        """Empty when the service can work."""
        return self._complaints(self._look())

    def _complaints(self, seen: list[Seen]) -> list[Complaint]:
        found = _distinct([each for loop in seen if _has_a_say(loop) and (each := _complaint(loop))])
        main = next((loop for loop in seen if loop.name == self.service), None)
        if self.phase is Phase.STOPPING:
            found.insert(0, Complaint(reason="stopping", since=_now()))
        elif not found and (main is None or main.latest_success_at is None):
            found.append(Complaint(reason="starting", since=self._started_at))
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


def database_document(seen: list[Seen], *, is_quiet: bool = False) -> Document:
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


def _has_a_say(loop: Seen) -> bool:
    return loop.is_essential or loop.name in _CONTACTS


def _contacts(seen: list[Seen]) -> list[Seen]:
    return [loop for loop in seen if loop.name in _CONTACTS]


def _complaint(loop: Seen) -> Complaint | None:
    if loop.is_stalled:
        since = _now() - timedelta(seconds=loop.quiet_seconds)
        return Complaint(reason=f"loop {loop.name} has not ticked for {loop.quiet_seconds:.0f} s", since=since)
    if loop.failing_since and loop.is_unreachable:
        return Complaint(reason=f"database unreachable: {loop.reason}", since=loop.failing_since)
    if loop.failing_since:
        return Complaint(reason=f"loop {loop.name} is failing: {loop.reason}", since=loop.failing_since)
    if loop.blocked:
        return Complaint(reason=loop.blocked, since=_now())
    return None


def _distinct(complaints: list[Complaint]) -> list[Complaint]:
    """Each reason once, the oldest: in an outage all loops report the same."""
    found: dict[str, Complaint] = {}
    for each in sorted(complaints, key=lambda complaint: complaint.since):
        found.setdefault(each.reason, each)
    return list(found.values())


def _troubles(complaints: list[Complaint]) -> Document:
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


def _loop_document(loop: Seen) -> Document:
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
