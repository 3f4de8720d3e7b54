"""From claims to running attempts: each claimed task is looked up in its DAG version, and launched.

While there are outcomes to report, launching waits until the exchange is sent: it then runs while the database works,
and neither waits for the other.
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
from evertick.services.grants import Grants, needs_grants
from evertick.services.holding import Holding
from evertick.services.link import Link
from evertick.services.storing import Storing
from evertick.services.versions import Version, Versions, order
from evertick.store.secrets import Holder
from evertick.store.tasks import StepRow

Known = tuple[StepRow, Version, str]
_FAILURES = (psycopg.Error, EvertickError, IndexError, ValueError, OSError)


class Starting:
    """The launcher of one session. `on_started` is called after each start."""

    def __init__(
        self,
        *,
        holding: Holding,
        executor: LocalExecutor,
        link: Link,
        session: int,
        grants: Grants,
        storing: Storing,
        on_started: Callable[[], None],
    ) -> None:
        self._holding, self._executor, self._link = holding, executor, link
        self._session, self._on_started, self._grants = session, on_started, grants
        self._storing = storing
        self._versions = Versions()
        self._put_off: list[tuple[list[Known], float | None]] = []
        self._granting: set[asyncio.Task[None]] = set()
        self._trouble: Exception | None = None

    async def start(self, claims: list[StepRow], since: float | None) -> None:
        """Start the tasks claimed after an attempt ended at `since`. A task that cannot be started has ended in
        `holding`, with the reason. Raises when the database was unreachable, so that the runner pauses."""
        trouble, self._trouble = self._trouble, None
        known: list[Known] = []
        granting: list[tuple[StepRow, Version]] = []
        for claim in claims:
            try:
                version = await self._versions.fetch(self._link, claim.version_id)
                if needs_grants(version.spec.tasks[claim.idx]) or self._storing.needs(claim.inputs):
                    granting.append((claim, version))
                else:
                    known.append((claim, version, ""))
            except _FAILURES as error:
                trouble = self._give_up(claim, error) or trouble
        for claim, version in granting:
            task = asyncio.create_task(self._start_granted(claim, version))
            self._granting.add(task)
            task.add_done_callback(self._granting.discard)
        if self._holding.has_ended and trouble is None:
            self._put_off.append((known, since))
            return
        self._start_known(known, since)
        if trouble is not None:
            raise trouble

    async def _start_granted(self, claim: StepRow, version: Version) -> None:
        """Start a task that needs secrets or large inputs: concurrently, because their backends may take long to
        answer."""
        known: list[Known] = []
        try:
            if self._storing.needs(claim.inputs):
                await self._storing.fetch(claim.run_id, claim.inputs or "")
            holder = Holder(key=_key(claim), epoch=claim.epoch, session=self._session)
            granted = await self._grants.of_task(self._link, version.spec.tasks[claim.idx], holder)
            if self._holding.holds(_key(claim), claim.epoch):
                known.append((claim, version, granted))
        except _FAILURES as error:
            # The next start raises it, and the runner pauses.
            self._trouble = self._give_up(claim, error) or self._trouble
        self._start_known(known, None)

    def _give_up(self, claim: StepRow, error: Exception) -> Exception | None:
        """End a claim that cannot be started. If the task is not the cause, it is returned to the queue and the error
        is returned, so that the runner pauses instead of claiming it again at once."""
        is_ours = isinstance(error, psycopg.Error | PostgresUnavailable | OSError)
        self._end(claim, OutcomeKind.GIVEN_BACK if is_ours else OutcomeKind.FAILED, error)
        return error if is_ours else None

    def start_soon(self) -> None:
        """Start the postponed tasks as soon as the caller awaits something."""
        put_off, self._put_off = self._put_off, []
        for claims, since in put_off:
            asyncio.get_running_loop().call_soon(self._start_known, claims, since)

    def _start_known(self, claims: list[Known], since: float | None) -> None:
        orders: list[AttemptOrder] = []
        for claim, version, granted in claims:
            try:
                orders.append(self._order(claim, version, granted))
            except (EvertickError, IndexError, ValueError) as error:
                self._end(claim, OutcomeKind.FAILED, error)
        try:
            self._executor.start_many(orders)
        except Conflict as error:
            # The executor is already stopping.
            for each in orders:
                self._holding.end_early(each.key, each.epoch, OutcomeKind.GIVEN_BACK, str(error))
        if since is not None:
            metrics.HOP_SECONDS.observe(time.monotonic() - since)
        self._on_started()

    def _order(self, claim: StepRow, version: Version, granted: str) -> AttemptOrder:
        made = order(claim, version, self._session, granted)
        task = version.spec.tasks[claim.idx]
        self._holding.describe(made.key, task.retry, f"{version.spec.name}.{task.name}")
        if task.choice is not None:
            self._holding.judge_by(made.key, version.spec)
        return made

    def _end(self, claim: StepRow, kind: OutcomeKind, error: Exception) -> None:
        self._holding.end_early(_key(claim), claim.epoch, kind, f"{type(error).__name__}: {error}")


def _key(claim: StepRow) -> TaskKey:
    return TaskKey(claim.run_id, claim.idx, claim.map_index)
