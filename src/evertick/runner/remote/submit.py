"""Submits attempts to a remote executor, with retries. Each try is stamped before it is made, so that an attempt is
never considered lost during a try (B11).

An executor accepts a name once: trying again after a lost response creates no duplicate (A11).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.db.queries.runners import DispatchRow
from evertick.domain.agent_protocol import attempt_name
from evertick.domain.attempt import TaskKey, storable_text
from evertick.domain.errors import (
    EvertickError,
    ExecutorBusy,
    ExecutorUnavailable,
    PostgresUnavailable,
    SubmissionRefused,
)
from evertick.domain.executor_options import place_of
from evertick.domain.retry import delay_before
from evertick.engine.remote_attempts import DispatchResult, NotStarted, end_queued
from evertick.executors.base import RemoteExecutor, RemoteOrder
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runner.launch import VersionCache
from evertick.runner.remote.worker_pool import SubmissionBackoff, WorkerPool, back_off
from evertick.runtime.connections import Notifier, ReconnectingConnection
from evertick.secrets.agent_tokens import AgentTokens

# A call that takes longer counts as unanswered.
CALL_SECONDS = 60.0
_LONGEST_TROUBLE = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteContext:
    """Shared by the parts of one session. `owner` is its session."""

    settings: Settings
    executor: RemoteExecutor
    owner: int
    link: ReconnectingConnection
    notifier: Notifier
    versions: VersionCache
    tokens: AgentTokens
    api_url: str
    log: Log

    def notify(self) -> None:
        """Notify the processes that can act on the end of an attempt."""
        self.notifier.wake(Channel.TASKS)
        self.notifier.wake(Channel.SCHEDULE)

    async def record_early_end(self, end: NotStarted) -> bool:
        """Record an attempt that never started. Returns whether that changed anything."""
        done = await end_queued(await self.link.get(), [end], infra_retries=self.settings.infra_retries)
        self.notify()
        return bool(done.moved_sessions)


async def in_time(call: Awaitable[T]) -> T:
    """The executor's response. A call that takes too long, or a network error, counts as an unreachable executor."""
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return await call
    except TimeoutError:
        raise ExecutorUnavailable(f"it did not answer within {CALL_SECONDS:.0f} s") from None
    except OSError as error:
        raise ExecutorUnavailable(f"{type(error).__name__}: {error}") from None


def as_trouble(text: str) -> str:
    """The executor's message, as it is stored."""
    return storable_text(text[:_LONGEST_TROUBLE])


def name_of(row: DispatchRow) -> str:
    return attempt_name(row.key, row.epoch, row.session)


class Submitter:
    """The submitter of one session. `pool` bounds the submissions in progress; while `backoff` lasts none is started."""

    def __init__(self, context: RemoteContext, *, pool: WorkerPool, backoff: SubmissionBackoff) -> None:
        self._context, self._pool, self._backoff = context, pool, backoff
        self._failures: dict[int, int] = {}

    def enqueue(self, row: DispatchRow) -> bool:
        return self._pool.enqueue(row.session, lambda: self._submit(row))

    def forget(self, listed: set[int]) -> None:
        """Forget the errors of attempts that are no longer on the list."""
        self._failures = {session: count for session, count in self._failures.items() if session in listed}

    async def _submit(self, row: DispatchRow) -> None:
        if not self._backoff.is_over:
            # It is queued again when the pause is over.
            return
        context = self._context
        conn = await context.link.get()
        if row.session not in await runners.note_tries(conn, owner=context.owner, sessions=[row.session]):
            return
        began = time.monotonic()
        try:
            order = await self._order(row)
        except PostgresUnavailable:
            raise
        except (EvertickError, IndexError) as error:
            # The version cannot be read: not the executor's fault, and no other attempt waits for it (V11).
            context.log.warning("dispatch_failed", attempt=name_of(row), reason="refused", error=error)
            await context.record_early_end(never_began(row, DispatchResult.FAILED, f"{type(error).__name__}: {error}"))
            return
        try:
            await in_time(context.executor.submit(order))
        except SubmissionRefused as error:
            await self._refuse(row, error)
        except ExecutorBusy as error:
            seconds = self._backoff.note_failure(error.retry_after_seconds)
            await self._note(row, error, "busy", seconds)
        except (ExecutorUnavailable, EvertickError) as error:
            failures = self._failures[row.session] = self._failures.get(row.session, 0) + 1
            seconds = max(self._backoff.note_failure(), back_off(failures))
            await self._note(row, error, "unavailable", seconds)
        else:
            self._backoff.note_success()
            self._failures.pop(row.session, None)
            metrics.DISPATCH_LATENCY.observe(row.queued_seconds + time.monotonic() - began)
            context.log.info("task_submitted", attempt=name_of(row), queue=row.queue, tries=row.tries + 1)
            await runners.note_submitted(conn, owner=context.owner, sessions=[row.session])

    async def _order(self, row: DispatchRow) -> RemoteOrder:
        assert row.version_id is not None
        context, version = self._context, await self._context.versions.get(self._context.link, row.version_id)
        return RemoteOrder(
            name=name_of(row),
            key=row.key,
            epoch=row.epoch,
            session=row.session,
            dag=version.spec.name,
            task=version.spec.tasks[row.idx].name,
            queue=row.queue,
            bundle=version.bundle,
            token=context.tokens.make_start_token(key=row.key, epoch=row.epoch, session=row.session),
            api_url=context.api_url,
            place=place_of(version.spec.executor_options, version.spec.tasks[row.idx].executor_options),
        )

    async def _note(self, row: DispatchRow, error: EvertickError, kind: str, seconds: float) -> None:
        metrics.DISPATCH_FAILED.labels(reason=kind).inc()
        self._context.log.warning("dispatch_failed", attempt=name_of(row), reason=kind, error=error, retry_in=seconds)
        trouble = {"session": row.session, "trouble": as_trouble(f"{error}"), "seconds": seconds}
        conn = await self._context.link.get()
        await runners.note_troubles(conn, owner=self._context.owner, troubles=[trouble])

    async def _refuse(self, row: DispatchRow, error: SubmissionRefused) -> None:
        """The executor works, and has nothing of this attempt."""
        self._backoff.note_success()
        metrics.DISPATCH_FAILED.labels(reason="refused").inc()
        self._context.log.warning("dispatch_failed", attempt=name_of(row), reason="refused", error=error)
        assert row.version_id is not None and row.attempt is not None
        version = await self._context.versions.get(self._context.link, row.version_id)
        policy = version.spec.tasks[row.idx].retry
        await self._context.record_early_end(
            never_began(
                row,
                DispatchResult.FAILED,
                f"refused by its executor: {error}",
                delay_before(policy, max(row.attempt, 1), random.random()),
            )
        )


def never_began(row: DispatchRow, kind: DispatchResult, reason: str, retry_in_seconds: float = 0.0) -> NotStarted:
    key = TaskKey(row.run_id, row.idx, row.map_index)
    return NotStarted(
        key=key, epoch=row.epoch, session=row.session, kind=kind, reason=reason, retry_in_seconds=retry_in_seconds
    )
