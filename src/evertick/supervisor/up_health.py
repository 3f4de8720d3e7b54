"""The health of `evertick up` as a whole: the supervisor's view of its children, and each child's own report.

Queries the children's health ports on request, all at once and with a short timeout: one that hangs is reported as
such, and delays nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from evertick.observability import metrics
from evertick.observability.health import (
    HEALTHY,
    UNHEALTHY,
    Document,
    LoopHealth,
    ServicePhase,
    all_loops,
    health_routes,
    iso,
    json_answer,
    metrics_answer,
    metrics_text,
    readiness,
    service_document,
)
from evertick.observability.health_endpoint import EndpointResponse, Route, get
from evertick.supervisor.fork_server import ServiceProcess

ASK_SECONDS = 1.0
CRASH_LOOP_DEATHS = 3
STEADY_SECONDS = 10.0
_OWN = "up"


# A child's own document, or why there is none.
Said = Document | str


@dataclass(slots=True)
class ChildService:
    """One child as its supervisor sees it. A death within ten seconds of its start is a quick death."""

    # Also its command.
    name: str
    process: ServiceProcess | None = None
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    is_dismissed: bool = False
    pid: int | None = None
    url: str | None = None
    restarts: int = 0
    quick_deaths: int = 0
    last_exit: str | None = None
    last_exit_at: datetime | None = None
    born: float = 0.0
    # Not started yet: there has been no request for it.
    is_asleep: bool = False

    def is_born(self, process: ServiceProcess) -> None:
        self.process, self.is_asleep = process, False
        self.pid, self.url, self.born = process.pid, None, time.monotonic()

    def has_died(self, reason: str) -> None:
        self.quick_deaths = 0 if self._is_steady else self.quick_deaths + 1
        self.has_left(reason)
        self.restarts += 1
        metrics.RESTARTS.labels(service=self.name).inc()

    def has_left(self, reason: str) -> None:
        """It ended on request, and is not restarted."""
        self.pid, self.url = None, None
        self.last_exit, self.last_exit_at = reason, datetime.now(UTC)

    @property
    def is_crash_looping(self) -> bool:
        return self.quick_deaths >= CRASH_LOOP_DEATHS and (self.pid is None or not self._is_steady)

    @property
    def _is_steady(self) -> bool:
        return time.monotonic() - self.born > STEADY_SECONDS

    @property
    def trouble(self) -> str | None:
        if self.is_crash_looping:
            return f"crash loop: died {self.quick_deaths} times soon after its start, last: {self.last_exit}"
        return None if self.pid is not None or self.is_asleep else f"not running: {self.last_exit or 'not started yet'}"


class UpHealth:
    def __init__(self, children: Sequence[ChildService], *, owner: str) -> None:
        self._children, self._owner = children, owner
        self.phase = ServicePhase.STARTING
        self._started_at = datetime.now(UTC)

    def routes(self) -> dict[str, Route]:
        return health_routes(readyz=self._readyz, monitor=self._monitor, metrics=self._metrics)

    async def document(self) -> Document:
        answers = await asyncio.gather(*map(_ask_child, self._children))
        said = dict(zip((child.name for child in self._children), answers, strict=True))
        components = {child.name: _component(child, said[child.name]) for child in self._children}
        database = _database(said)
        statuses = [component["status"] for component in (*components.values(), database)]
        is_well = (
            all(status == HEALTHY for status in statuses) and self.phase is ServicePhase.RUNNING and not _stalled()
        )
        own = service_document(_OWN, self._owner, self.phase, self._started_at, is_well=is_well)
        return {**own, "metadatabase": database, **components}

    async def _readyz(self) -> EndpointResponse:
        document = await self.document()
        reasons = [] if self.phase is ServicePhase.RUNNING else [self.phase.value]
        reasons += [f"loop {each.name} has not ticked for {each.quiet_seconds:.0f} s" for each in _stalled()]
        for child in self._children:
            component = document[child.name]
            assert isinstance(component, dict)
            reasons += [f"{child.name}: {reason}" for reason in _reasons(component)]
        return readiness(_OWN, reasons)

    async def _monitor(self) -> EndpointResponse:
        return json_answer(await self.document())

    async def _metrics(self) -> EndpointResponse:
        """The metrics of all processes, distinguished by a label: one address to scrape for a whole `up`."""
        asked = [(child.name, child.url) for child in self._children if child.url]
        texts = await asyncio.gather(*(_get_text(f"{url}/metrics") for _, url in asked))
        merged = _Merged()
        merged.add(_OWN, metrics_text().decode())
        for (name, _), text in zip(asked, texts, strict=True):
            merged.add(name, text)
        return metrics_answer(generate_latest(merged))


class _Merged:
    """The metrics of several processes as one collection."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, name: str, text: str) -> None:
        for family in text_string_to_metric_families(text):
            merged = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "process": name}))

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


async def _ask_child(child: ChildService) -> Said:
    if child.is_asleep:
        return {child.name: {"status": HEALTHY, "latest_heartbeat": None, "is_asleep": True}}
    if child.url is None:
        return child.trouble or "its health port is not open yet"
    try:
        return (await get(f"{child.url}/monitor/health", seconds=ASK_SECONDS)).document()
    except TimeoutError:
        return f"does not answer within {ASK_SECONDS:g} s"
    except (OSError, ValueError) as error:
        return f"does not answer: {error}"


async def _get_text(url: str) -> str:
    """Empty if unavailable: the others are still worth having."""
    try:
        return (await get(url, seconds=ASK_SECONDS)).body.decode("utf-8", "replace")
    except (OSError, TimeoutError, ValueError):
        return ""


def _component(child: ChildService, said: Said) -> Document:
    own = said.get(child.name) if isinstance(said, dict) else None
    reasons = [child.trouble] if child.trouble else [] if isinstance(said, dict) else [str(said)]
    document: Document = dict(own) if isinstance(own, dict) else {"status": UNHEALTHY, "latest_heartbeat": None}
    if reasons:
        document |= {"status": UNHEALTHY, "reasons": [*reasons, *_reasons(document)]}
    return document | {
        "pid": child.pid,
        "url": child.url,
        "restarts": child.restarts,
        "is_crash_looping": child.is_crash_looping,
        "last_exit": child.last_exit,
        "last_exit_at": iso(child.last_exit_at),
    }


def _reasons(component: Document) -> list[str]:
    found = component.get("reasons")
    return [str(each) for each in found] if isinstance(found, list) else []


def _database(said: dict[str, Said]) -> Document:
    """The worst state that a child reports; without any report the state is not healthy."""
    known = [each.get("metadatabase") for each in said.values() if isinstance(each, dict)]
    found = [each for each in known if isinstance(each, dict)]
    bad = [each for each in found if each.get("status") != HEALTHY]
    return (bad or found or [{"status": UNHEALTHY, "latest_contact": None, "reason": "no service answers"}])[0]


def _stalled() -> list[LoopHealth]:
    return [loop for loop in all_loops() if loop.is_essential and loop.is_stalled]
