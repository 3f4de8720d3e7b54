"""From claims to running attempts: what a runner has claimed is looked up in its DAG version, and started.

While there are ends to tell, starting waits until the database has been asked: it starts while that answers, and neither
waits for the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psycopg

from evertick.domain.attempt import AttemptOrder, OutcomeKind, TaskKey
from evertick.domain.errors import Conflict, EvertickError, PostgresUnavailable
from evertick.execution.local import LocalExecutor
from evertick.services import metrics
from evertick.services.holding import Holding
from evertick.services.link import Link
from evertick.services.versions import Version, Versions, order
from evertick.store.tasks import StepRow

Known = tuple[StepRow, Version]


class Starting:
    """One session's. `on_started` is called after each start."""

    def __init__(
        self,
        *,
        holding: Holding,
        executor: LocalExecutor,
        link: Link,
        session: int,
        on_started: Callable[[], None],
    ) -> None:
        self._holding, self._executor, self._link = holding, executor, link
        self._session, self._on_started = session, on_started
        self._versions = Versions()
        self._put_off: list[tuple[list[Known], float | None]] = []

    async def start(self, claims: list[StepRow], since: float | None) -> None:
        """Start what was claimed after something had ended at `since`. What cannot be ordered has ended in `holding`, with the
        reason; raises when the database could not be asked, so that the runner pauses.
        """
        trouble: Exception | None = None
        known: list[Known] = []
        for claim in claims:
            try:
                known.append((claim, await self._versions.fetch(self._link, claim.version_id)))
            except (psycopg.Error, PostgresUnavailable, OSError) as error:
                # No fault of the task's: it goes back, and so that this does not go round and round, we pause.
                trouble = error
                self._end(claim, OutcomeKind.GIVEN_BACK, error)
            except (EvertickError, ValueError) as error:
                self._end(claim, OutcomeKind.FAILED, error)
        if self._holding.has_ended and trouble is None:
            self._put_off.append((known, since))
            return
        self._start_known(known, since)
        if trouble is not None:
            raise trouble

    def start_soon(self) -> None:
        """Start what was put off as soon as whoever calls this waits for something."""
        put_off, self._put_off = self._put_off, []
        for claims, since in put_off:
            asyncio.get_running_loop().call_soon(self._start_known, claims, since)

    def _start_known(self, claims: list[Known], since: float | None) -> None:
        orders: list[AttemptOrder] = []
        for claim, version in claims:
            try:
                orders.append(self._order(claim, version))
            except (EvertickError, IndexError, ValueError) as error:
                self._end(claim, OutcomeKind.FAILED, error)
        try:
            self._executor.start_many(orders)
        except Conflict as error:
            # It is stopping by now.
            for each in orders:
                self._holding.end_early(each.key, each.epoch, OutcomeKind.GIVEN_BACK, str(error))
        if since is not None:
            metrics.HOP_SECONDS.observe(time.monotonic() - since)
        self._on_started()

    def _order(self, claim: StepRow, version: Version) -> AttemptOrder:
        made = order(claim, version, self._session)
        task = version.spec.tasks[claim.idx]
        self._holding.describe(made.key, task.retry, f"{version.spec.name}.{task.name}")
        return made

    def _end(self, claim: StepRow, kind: OutcomeKind, error: Exception) -> None:
        key = TaskKey(claim.run_id, claim.idx, claim.map_index)
        self._holding.end_early(key, claim.epoch, kind, f"{type(error).__name__}: {error}")
