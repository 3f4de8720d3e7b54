"""Lists an executor's attempts of this installation, every few seconds and whenever the executor signals a change. Only
the listing counts; the signal makes it early.

An attempt at the executor that has no row in the work list is deleted: it was abandoned while it was being submitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from math import inf

from evertick.db.queries import runners
from evertick.domain.agent_protocol import parse_name
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable
from evertick.executors.base import Observed, Phase
from evertick.observability import metrics
from evertick.observability.health import LoopHealth
from evertick.runner.remote.submit import RemoteContext, in_time
from evertick.runner.remote.worker_pool import Backoff
from evertick.runtime.loop import back_off, run_loop

LIST_TICKS, LONGEST_LIST_SECONDS = 5, 5.0
# Every change is a signal, and a listing returns everything: with many changes, signals are collected for this share of
# the interval.
GATHER_SHARE = 0.1
MOST_ORPHANS = 100


class Observer:
    """`latest` is the latest listing, None until there is one; `count` counts them, `wake` is set after each."""

    def __init__(self, context: RemoteContext, *, wake: asyncio.Event) -> None:
        self._context, self._wake_session = context, wake
        self.latest: Mapping[str, Observed] | None = None
        self.count = 0
        self._seconds = min(LIST_TICKS * context.settings.tick_seconds, LONGEST_LIST_SECONDS)
        self._backoff = Backoff(longest_seconds=6 * self._seconds)
        self._wake = asyncio.Event()
        self._listed_at = -inf
        self._orphans: set[str] = set()
        self._deleted: set[str] = set()
        self._undeletable: set[str] = set()

    async def run(self) -> None:
        """Run until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            never = asyncio.Event()
            pulse = LoopHealth("observe", is_essential=False)
            await run_loop(self.tick, wake=self._wake, stop=never, name="observe", log=self._context.log, pulse=pulse)

    async def tick(self) -> float:
        await asyncio.sleep(max(self._listed_at + GATHER_SHARE * self._seconds - time.monotonic(), 0.0))
        self._wake.clear()
        try:
            seen = await in_time(self._context.executor.observe())
        except (ExecutorBusy, ExecutorUnavailable) as error:
            metrics.DISPATCH_FAILED.labels(reason="observe").inc()
            after = error.retry_after_seconds if isinstance(error, ExecutorBusy) else None
            seconds = self._backoff.note_failure(after)
            self._context.log.warning("executor_unavailable", error=error, retry_in=seconds)
            # Signals must not make an executor that is already in trouble answer more often.
            await asyncio.sleep(seconds)
            return 0.0
        self._backoff.note_success()
        self._listed_at = time.monotonic()
        self.latest = seen
        self.count += 1
        self._wake_session.set()
        await self._delete_orphans(seen)
        return self._seconds

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                async for _ in self._context.executor.hints():
                    failures = 0
                    self._wake.set()
            except Exception as error:
                # Whatever the error: nothing depends on signals.
                self._context.log.warning("listen_failed", error=error)
            failures += 1
            await asyncio.sleep(back_off(failures))

    async def _delete_orphans(self, seen: Mapping[str, Observed]) -> None:
        """Rows are read after the listing and are created before an attempt is submitted: an attempt without a row then
        is an orphan."""
        named = {name: attempt.session for name in seen if (attempt := parse_name(name)) is not None}
        if not named:
            self._orphans, self._deleted, self._undeletable = set(), set(), set()
            return
        known = await runners.known(await self._context.link.get(), list(named.values()))
        orphans = {name for name, session in named.items() if session not in known}
        # Twice in a row, because an attempt that its own action is deleting stays visible for a moment. One that could
        # not be deleted is tried after all others, so that it does not block them.
        found = sorted((orphans & self._orphans) - self._deleted, key=lambda name: (name in self._undeletable, name))
        self._orphans, self._deleted, self._undeletable = orphans, self._deleted & orphans, self._undeletable & orphans
        for name in found[:MOST_ORPHANS]:
            if not await self._delete(name, seen[name].phase):
                break

    async def _delete(self, name: str, phase: Phase) -> bool:
        """Returns whether the executor deleted it."""
        self._context.log.warning("orphan_removed", attempt=name, phase=phase.value)
        try:
            await in_time(self._context.executor.cancel(name, self._context.settings.stop_grace_seconds))
        except (ExecutorBusy, ExecutorUnavailable) as error:
            self._undeletable.add(name)
            metrics.DISPATCH_FAILED.labels(reason="stray").inc()
            self._context.log.warning("executor_unavailable", attempt=name, error=error)
            return False
        if phase is Phase.ENDED:
            # The executor may keep it for inspection: one request is enough.
            self._deleted.add(name)
        return True
