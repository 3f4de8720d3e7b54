"""The exchange of a runner with the database: it reports how attempts ended, and claims tasks in the same round trip.

Claims from all of its queues or only tasks that match its patterns, and periodically the longest waiting first. Never
lets one report delay the others (V11): a report that the database refuses is recorded as a failure with the reason; if
that is refused, too, it is retried later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import runners
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import ReportRefused
from evertick.domain.routing import Pattern, address_of, matches, read_pattern
from evertick.engine.finish_and_claim import ClaimCursor, Exchange, PatternClaims, exchange_matching, finish_and_claim
from evertick.engine.remote_attempts import claim_for_dispatch, claim_matching_for_dispatch
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runner.events import ResultStored
from evertick.runner.state import FinishedAttempt
from evertick.storage.results import Transfers

MOST_PUBLISHED = 200_000
MOST_LOG_LINES = 8
# The planner is notified of tasks that have to wait for a time.
MAY_WAIT = (OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.KILLED, OutcomeKind.LOST, OutcomeKind.DEFERRED)

_FINISHED = {kind: metrics.ATTEMPTS_FINISHED.labels(outcome=kind.value) for kind in OutcomeKind}

# Sends these reports, and claims up to the number of free slots.
Send = Callable[[list[Outcome], int], Awaitable[Exchange]]


class Claims:
    """The claims of one session."""

    def __init__(
        self,
        *,
        session: int,
        queues: Sequence[str],
        patterns: Sequence[Pattern],
        aging_seconds: float,
        infra_retries: int,
    ) -> None:
        self._session, self._queues, self._patterns = session, list(queues), list(patterns)
        self._matching: PatternClaims | None = None
        if self._patterns:
            self._matching = PatternClaims(self._patterns, self._queues, aging_seconds=aging_seconds)
        self._cursor = ClaimCursor(len(self._queues), aging_seconds=aging_seconds)
        # Reports ended attempts, and claims up to `free` tasks.
        self.exchange: Callable[..., Awaitable[Exchange]] = partial(
            finish_and_claim, session=session, queues=self._queues, infra_retries=infra_retries, cursor=self._cursor
        )
        if self._matching is not None:
            self.exchange = partial(
                exchange_matching, matching=self._matching, session=session, infra_retries=infra_retries
            )

    @classmethod
    def of(cls, settings: Settings, *, session: int, queues: Sequence[str], match: Sequence[str]) -> Self:
        return cls(
            session=session,
            queues=queues,
            patterns=[read_pattern(text) for text in match],
            aging_seconds=settings.priority_aging_seconds,
            infra_retries=settings.infra_retries,
        )

    async def claim_for_dispatch(self, conn: AsyncConnection, free: int) -> int:
        """Claim up to `free` tasks for a remote executor: they become queued. Returns the number claimed."""
        if self._matching is not None:
            rows = await claim_matching_for_dispatch(conn, self._matching, session=self._session, free=free)
        else:
            rows = await claim_for_dispatch(
                conn, session=self._session, queues=self._queues, free=free, cursor=self._cursor
            )
        return len(rows)

    async def unmatched(self, conn: AsyncConnection) -> list[tuple[str, str]]:
        """Every pattern that matches no task this runner could claim, with the reason."""
        if not self._patterns:
            return []
        published = await runners.published(conn, limit=MOST_PUBLISHED)
        found = [(pattern.text, self._problem_of(pattern, published)) for pattern in self._patterns]
        return [(pattern, problem) for pattern, problem in found if problem]

    def _problem_of(self, pattern: Pattern, published: list[runners.RoutedTask]) -> str | None:
        found = {each.queue for each in published if matches(pattern, address_of(each.dag, each.task))}
        if not found:
            return "No published task matches it, so this runner claims nothing by it until one is published."
        if found.isdisjoint(self._queues):
            where, served = ", ".join(sorted(found)), ", ".join(self._queues)
            return f"Its tasks wait in {where}, but this runner serves only {served}: add that to its --queues."
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """The database's answer, and the outcomes that it refused."""

    answer: Exchange
    unstored: list[Outcome]


async def report_outcomes(send: Send, ended: list[Outcome], free: int, *, log: Log) -> ReportResult:
    """One round trip; if the database refuses it, halve the batch until the refused report is isolated.

    Raises when the reports are not the cause. Sending them again is then harmless.
    """
    try:
        return ReportResult(answer=await send(ended, free), unstored=[])
    except (psycopg.Error, ReportRefused) as error:
        if not ended or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", reports=len(ended), error=error)
        if len(ended) == 1:
            return await _report_failure(send, ended[0], free, str(error), log=log)
    middle = len(ended) // 2
    first = await report_outcomes(send, ended[:middle], 0, log=log)
    second = await report_outcomes(send, ended[middle:], free, log=log)
    return ReportResult(
        answer=Exchange(
            claims=second.answer.claims,
            refused=first.answer.refused + second.answer.refused,
            has_more=first.answer.has_more or second.answer.has_more,
            is_walking=second.answer.is_walking,
            has_arrivals=first.answer.has_arrivals or second.answer.has_arrivals,
        ),
        unstored=first.unstored + second.unstored,
    )


async def _report_failure(send: Send, outcome: Outcome, free: int, error: str, *, log: Log) -> ReportResult:
    reason = f"the outcome could not be stored: {error}".splitlines()[0]
    failure = Outcome(key=outcome.key, epoch=outcome.epoch, kind=OutcomeKind.FAILED, reason=reason)
    try:
        return ReportResult(answer=await send([failure], free), unstored=[])
    except (psycopg.Error, ReportRefused) as again:
        if isinstance(again, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", run=outcome.key.run_id, task=outcome.key.idx, epoch=outcome.epoch, error=again)
    # If this report is not the cause, this fails as well, and nothing was decided.
    return replace(await report_outcomes(send, [], free, log=log), unstored=[outcome])


def waits_for_trigger(outcome: Outcome) -> bool:
    return outcome.kind is OutcomeKind.DEFERRED and (outcome.result_json or "").startswith('{"trigger"')


def log_finished(finished: list[FinishedAttempt], *, log: Log) -> None:
    """Count the ended attempts, and log a line for each, or one for all when they are many."""
    cpu_seconds = 0.0
    for each in finished:
        _FINISHED[each.outcome.kind].inc()
        if (used := each.outcome.usage) is not None:
            cpu_seconds += used.cpu_seconds
            metrics.ATTEMPT_MEMORY.observe(used.peak_memory_bytes)
        if each.outcome.kind is OutcomeKind.TIMED_OUT:
            metrics.TIMEOUTS.labels(kind="execution").inc()
    metrics.ATTEMPT_CPU.inc(cpu_seconds)
    if len(finished) > MOST_LOG_LINES:
        log.info("task_finished", attempts=len(finished))
        return
    for each in finished:
        done = each.outcome
        facts = {"run": done.key.run_id, "epoch": done.epoch, "outcome": done.kind.value}
        log.info("task_finished", task=each.label, **facts, seconds=round(each.seconds, 3))


def log_refused(refused: Sequence[tuple[TaskKey, int]], *, log: Log) -> None:
    """Log reports of attempts that were taken away; they changed nothing."""
    metrics.STALE_WRITES_REFUSED.inc(len(refused))
    metrics.CLAIMS_LOST.inc(len(refused))
    for key, epoch in refused:
        log.warning("lease_lost", run=key.run_id, task=key.idx, epoch=epoch)


class Uploads:
    """Outcomes whose large results are on their way to object storage. Each is put into the queue once: when its result
    is stored, or when the runner stops before."""

    def __init__(self, transfers: Transfers, *, put: Callable[[ResultStored], None], group: asyncio.TaskGroup) -> None:
        self._transfers, self._put, self._group = transfers, put, group
        self._running: set[asyncio.Task[Outcome]] = set()

    def upload_first(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that can be reported now."""
        large = [outcome for outcome in outcomes if self._transfers.needs_upload(outcome)]
        for outcome in large:
            task = self._group.create_task(self._transfers.upload(outcome))
            self._running.add(task)
            task.add_done_callback(partial(self._finish, outcome))
        return [outcome for outcome in outcomes if outcome not in large] if large else outcomes

    async def stop(self) -> None:
        """The runner shuts down: attempts whose results are not stored by now run again elsewhere."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _finish(self, outcome: Outcome, task: asyncio.Task[Outcome]) -> None:
        self._running.discard(task)
        if task.cancelled():
            reason = "the runner stopped before the result was in the storage"
            self._put(ResultStored(replace(outcome, kind=OutcomeKind.GIVEN_BACK, reason=reason, result_json=None)))
        else:
            self._put(ResultStored(task.result()))
