"""Metrics and traces from the database: counts queued tasks, and sends ended runs as spans.

Only in the leader, on its own connection. Never part of planning: it may be slow, fail or be skipped without delaying
anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING

from psycopg import AsyncConnection

from evertick.db.connect import Purpose
from evertick.db.migrate import status
from evertick.db.queries import changes, runners
from evertick.observability import metrics
from evertick.observability.health import LoopHealth, value_of
from evertick.observability.logging import Log
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.loop import run_loop

if TYPE_CHECKING:
    from evertick.scheduler.otel import OtelSpans

COUNT_SECONDS = 10.0


# How soon a new leader begins to count.
QUEUE_SECONDS = 1.0


# Counting a queue of 10,000 takes about 5 ms. Beyond that the exact number does not matter.
MOST_COUNTED = 10_000


MOST_QUEUES = 100


class QueueDepth:
    def __init__(self, url: str, *, log: Log) -> None:
        self._link, self._log = ReconnectingConnection(url, Purpose.SCHEDULER), log
        self._known: set[str] = set()

    async def run(self) -> None:
        """Run until canceled."""
        try:
            await run_loop(
                self.tick, name="queue_depth", log=self._log, pulse=LoopHealth("queue_depth", is_essential=False)
            )
        finally:
            await self._link.close()

    async def tick(self) -> float:
        if not value_of(metrics.LEADER):
            await self._forget()
            return QUEUE_SECONDS
        counted = await runners.depths(await self._link.get(), cap=MOST_COUNTED, most=MOST_QUEUES)
        for queue, depth in counted.items():
            metrics.QUEUE_DEPTH.labels(queue=queue).set(depth)
        # A queue that is empty now is reported as 0, not left at its last count.
        for queue in self._known - counted.keys():
            metrics.QUEUE_DEPTH.labels(queue=queue).set(0)
        self._known |= counted.keys()
        return COUNT_SECONDS

    async def _forget(self) -> None:
        """Another scheduler counts: two that export the same series would be added up."""
        if self._known:
            metrics.QUEUE_DEPTH.clear()
            self._known = set()
            await self._link.close()


TRACE_SECONDS = 2.0


MOST_OPEN = 10_000


RUNS_PER_BATCH = 50


MOST_ATTEMPTS = 20_000


# Ids are assigned before they are committed: a run may appear below one that was already seen.
OVERLAP = 1_000


# How many runs may wait for an unreachable collector; beyond that the oldest get no trace, which is logged.
MOST_WAITING = 20_000


class Tracing:
    """`make` returns the span exporter for the name of this installation."""

    def __init__(self, url: str, *, make: Callable[[str], OtelSpans], log: Log) -> None:
        self._link, self._make, self._log = ReconnectingConnection(url, Purpose.READ), make, log
        self._spans: OtelSpans | None = None
        self._newest: int | None = None
        self._open: set[int] = set()
        # In order of arrival.
        self._waiting: dict[int, None] = {}
        self._traced: dict[int, None] = {}

    async def run(self) -> None:
        """Run until canceled."""
        pulse = LoopHealth("traces", longest_tick_seconds=60.0, is_essential=False)
        try:
            await run_loop(self.tick, name="traces", log=self._log, pulse=pulse)
        finally:
            if self._spans is not None:
                self._spans.close()
            await self._link.close()

    async def tick(self) -> float:
        if not value_of(metrics.LEADER):
            self._newest = None
            return TRACE_SECONDS
        conn = await self._link.get()
        if self._spans is None:
            self._spans = self._make((await status(conn)).applied[0].applied_at.isoformat())
        await self._look(conn)
        while self._waiting:
            await self._send(conn, self._spans, list(self._waiting)[:RUNS_PER_BATCH])
        return TRACE_SECONDS

    async def _look(self, conn: AsyncConnection) -> None:
        """Find the runs that ended since the last check: runs that were open, and runs that began and ended in between."""
        if self._newest is None:
            # A new leader begins with the runs that are open now.
            self._newest = await changes.newest(conn)
            self._traced |= dict.fromkeys(await self._ended_lately(conn, self._newest))
            self._open = set(await changes.open_run_ids(conn, limit=MOST_OPEN))
            return
        open_now = set(await changes.open_run_ids(conn, limit=MOST_OPEN))
        ended = [*sorted(self._open - open_now), *await self._ended_lately(conn, self._newest)]
        self._open = open_now
        for run_id in open_now & self._traced.keys():
            # Cleared: it ends once more.
            del self._traced[run_id]
        self._newest = max([self._newest, *ended])
        self._waiting |= dict.fromkeys(run_id for run_id in ended if run_id not in self._traced)
        dropped = list(self._waiting)[:-MOST_WAITING]
        for run_id in dropped:
            del self._waiting[run_id]
        if dropped:
            self._log.warning("traces_dropped", runs=len(dropped))

    async def _ended_lately(self, conn: AsyncConnection, newest: int) -> list[int]:
        return await changes.ended_after(conn, max(newest - OVERLAP, 0), limit=OVERLAP + MOST_OPEN)

    async def _send(self, conn: AsyncConnection, spans: OtelSpans, run_ids: list[int]) -> None:
        found = {run.run_id: run for run in await changes.runs(conn, run_ids)}
        attempts = await changes.attempts(conn, list(found), limit=MOST_ATTEMPTS)
        if len(attempts) == MOST_ATTEMPTS:
            self._log.warning("trace_truncated", runs=len(found), attempts=MOST_ATTEMPTS)
        of_run = {run_id: list(each) for run_id, each in groupby(attempts, key=lambda attempt: attempt.run_id)}
        for run_id, run in found.items():
            spans.add(run, of_run.get(run_id, []))
        if not await spans.send():
            raise ConnectionError(f"the trace collector did not accept {len(found)} of them; they are retried")
        for run_id in run_ids:
            del self._waiting[run_id]
        self._traced |= dict.fromkeys(found)
        for run_id in list(self._traced)[: -(OVERLAP + MOST_OPEN)]:
            del self._traced[run_id]


def make_spans(endpoint: str, log: Log) -> Callable[[str], OtelSpans] | None:
    """A factory of span exporters; None, with a warning, if the extra is not installed."""
    try:
        otel = import_module("evertick.scheduler.otel")
    except ModuleNotFoundError as error:
        log.warning("tracing_disabled", missing=error.name, message="Traces need: pip install 'evertick[otel]'")
        return None

    return partial(otel.OtelSpans, endpoint)
