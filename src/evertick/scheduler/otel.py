"""Ended runs as OpenTelemetry spans, with ids derived from the run, sent to a collector by OTLP over HTTP.

Imported only where traces are enabled: it needs `pip install evertick[otel]`. The OTEL_ variables for headers,
sampling, certificates and resource attributes apply. Must never delay the service: sending has its own thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from evertick.db.queries.changes import EndedAttempt, EndedRun
from evertick.runtime.thread_runner import ThreadRunner

_TRACE_BYTES, _SPAN_BYTES = 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIds:
    """The ids of one run's trace."""

    installation: str
    run_id: int

    @property
    def trace(self) -> int:
        return _number(f"{self.installation}/run/{self.run_id}", _TRACE_BYTES)

    def span(self, *parts: object) -> int:
        """The id of one span, such as ("attempt", idx, map_index, epoch)."""
        path = "/".join(str(part) for part in parts)
        return _number(f"{self.installation}/run/{self.run_id}/{path}", _SPAN_BYTES)


def _number(text: str, size: int) -> int:
    """Never zero: that means "none" in a trace."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1


MOST_SPANS_PER_REQUEST = 1000


_FAILED = {"failed", "lost", "timed_out", "killed", "upstream_failed", "canceled"}


# The results of the semantic conventions for CI/CD: a lost attempt is the system's error, a failed one the user's.
_RESULTS = {
    "success": "success",
    "failed": "failure",
    "killed": "failure",
    "timed_out": "timeout",
    "lost": "error",
    "canceled": "cancellation",
    "skipped": "skip",
    "upstream_failed": "skip",
}


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


Attributes = dict[str, str | int]


class _GivenIds(IdGenerator):
    """The ids of the next span: they are derived, not random."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Collected(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.spans.append(span)


class OtelSpans:
    """Creates spans of ended runs and sends them."""

    def __init__(self, endpoint: str, installation: str) -> None:
        self._installation = installation
        self._ids, self._collected = _GivenIds(), _Collected()
        ours = Resource({SERVICE_NAME: "evertick"})
        provider = TracerProvider(
            resource=ours.merge(OTELResourceDetector().detect()), id_generator=self._ids, shutdown_on_exit=False
        )
        provider.add_span_processor(self._collected)
        self._tracer = provider.get_tracer("evertick")
        # Evertick reports an unreachable collector itself.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        self._exporter = OTLPSpanExporter(endpoint=traces_endpoint(endpoint))
        # A collector that hangs does not keep the process from exiting.
        self._threads = ThreadRunner("traces", most=1)

    def add(self, run: EndedRun, attempts: Sequence[EndedAttempt]) -> None:
        """One trace: the run, its trigger, and for each attempt how long it waited and how long it took."""
        ids = TraceIds(installation=self._installation, run_id=run.run_id)
        # Only a scheduled run begins at its date: another one may be for a day long ago.
        is_fire = run.kind == "scheduled"
        began = min(run.fire_at or run.created_at, run.created_at) if is_fire else run.created_at
        facts: Attributes = {"evertick.run": run.run_id, "evertick.dag": run.dag}
        whole = self._start(ids, ("run",), f"run {run.dag}", began, None, facts)
        whole.set_attributes({"evertick.version": run.version, "evertick.kind": run.kind, "evertick.state": run.state})
        whole.set_attributes(
            {
                "cicd.pipeline.name": run.dag,
                "cicd.pipeline.run.id": str(run.run_id),
                "cicd.pipeline.run.state": "finalizing",
                "cicd.pipeline.result": _RESULTS.get(run.state, "error"),
            }
        )
        verb = "fire" if is_fire else "trigger"
        self._start(ids, (verb,), f"{verb} {run.dag}", began, whole, facts).end(_nanoseconds(run.created_at))
        for each in attempts:
            self._add_attempt(ids, each, whole, facts)
        _settle(whole, run.state, run.reason)
        whole.end(_nanoseconds(run.finished_at))

    async def send(self) -> bool:
        """Returns whether the collector accepted all added spans; spans that it did not accept are dropped here."""
        spans, self._collected.spans = self._collected.spans, []
        for first in range(0, len(spans), MOST_SPANS_PER_REQUEST):
            batch = spans[first : first + MOST_SPANS_PER_REQUEST]
            if await self._threads.do(partial(self._exporter.export, batch)) is not SpanExportResult.SUCCESS:
                return False
        return True

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _add_attempt(self, ids: TraceIds, each: EndedAttempt, whole: Span, facts: Attributes) -> None:
        key = (each.idx, each.map_index, each.epoch)
        own = facts | {
            "evertick.task": each.task,
            "evertick.queue": each.queue,
            "evertick.epoch": each.epoch,
            "evertick.attempt": each.attempt,
        }
        own |= {"evertick.map_index": each.map_index} if each.map_index >= 0 else {}
        ready_at = min(each.ready_at, each.started_at)
        self._start(ids, ("wait", *key), f"wait {each.task}", ready_at, whole, own).end(_nanoseconds(each.started_at))
        own |= {"evertick.outcome": each.outcome}
        own |= {"evertick.runner": each.runner_id} if each.runner_id else {}
        own |= {"host.name": each.host, "cicd.worker.id": str(each.runner_id)} if each.host else {}
        own |= {
            "cicd.pipeline.task.name": each.task,
            "cicd.pipeline.task.run.id": f"{ids.run_id}/{each.idx}/{each.map_index}/{each.epoch}",
            "cicd.pipeline.task.run.result": _RESULTS.get(each.outcome, "error"),
        }
        attempt = self._start(ids, ("attempt", *key), f"attempt {each.task}", each.started_at, whole, own)
        _settle(attempt, each.outcome, each.reason)
        attempt.end(_nanoseconds(each.finished_at))

    def _start(
        self, ids: TraceIds, path: tuple[object, ...], name: str, at: datetime, parent: Span | None, facts: Attributes
    ) -> Span:
        self._ids.trace_id, self._ids.span_id = ids.trace, ids.span(*path)
        context = set_span_in_context(parent) if parent is not None else None
        kind = SpanKind.SERVER if parent is None else SpanKind.INTERNAL
        return self._tracer.start_span(name, context=context, kind=kind, start_time=_nanoseconds(at), attributes=facts)


def traces_endpoint(endpoint: str) -> str:
    """The base URL of a collector, as in OTEL_EXPORTER_OTLP_ENDPOINT, or the full path."""
    return endpoint if endpoint.rstrip("/").endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"


def _settle(span: Span, outcome: str, reason: str | None) -> None:
    if outcome in _FAILED:
        # Only the first line: the rest may be a user's traceback, with the values it quotes.
        span.set_status(Status(StatusCode.ERROR, (reason or outcome).split("\n", 1)[0]))
    else:
        span.set_status(Status(StatusCode.OK))


def _nanoseconds(instant: datetime) -> int:
    """Exact: a float is too imprecise."""
    return (instant - _EPOCH) // timedelta(microseconds=1) * 1000
