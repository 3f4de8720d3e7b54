"""How a runner claims: from all of its queues or only tasks that match its patterns, and periodically the longest
waiting first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import psycopg
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import runners
from evertick.domain.attempt import Outcome, OutcomeKind
from evertick.domain.routing import Pattern, address_of, matches, read_pattern
from evertick.engine.finish_and_claim import ClaimCursor, Exchange, PatternClaims, exchange_matching, finish_and_claim
from evertick.engine.remote_attempts import claim_for_dispatch, claim_matching_for_dispatch
from evertick.engine.runners import Held
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.runner.state import Finished

MOST_PUBLISHED = 200_000


class Claims:
    """The claims of one session."""

    def __init__(self, settings: Settings, *, session: int) -> None:
        self._session, self._infra_retries = session, settings.infra_retries
        self._queues = list(settings.runner_queues)
        self._patterns = [read_pattern(text) for text in settings.runner_match]
        self._matching: PatternClaims | None = None
        if self._patterns:
            self._matching = PatternClaims(self._patterns, self._queues, aging_seconds=settings.aging_seconds)
        self._cursor = ClaimCursor(len(self._queues), aging_seconds=settings.aging_seconds)

    async def step(self, conn: AsyncConnection, reports: list[str], free: int) -> Exchange:
        """Report ended attempts, and claim up to `free` tasks."""
        if self._matching is not None:
            return await exchange_matching(
                conn,
                self._matching,
                session=self._session,
                reports=reports,
                free=free,
                infra_retries=self._infra_retries,
            )
        return await finish_and_claim(
            conn,
            session=self._session,
            reports=reports,
            queues=self._queues,
            free=free,
            infra_retries=self._infra_retries,
            cursor=self._cursor,
        )

    async def warn_if_idle(self, conn: AsyncConnection, *, log: Log) -> None:
        """Warn about every pattern that matches no task this runner could claim."""
        if not self._patterns:
            return
        published = await runners.published(conn, limit=MOST_PUBLISHED)
        for pattern in self._patterns:
            if problem := self._problem_of(pattern, published):
                log.warning("matches_nothing", pattern=pattern.text, message=problem)

    def _problem_of(self, pattern: Pattern, published: list[runners.RoutedTask]) -> str | None:
        found = {each.queue for each in published if matches(pattern, address_of(each.dag, each.task))}
        if not found:
            return "No published task matches it, so this runner claims nothing by it until one is published."
        if found.isdisjoint(self._queues):
            where, served = ", ".join(sorted(found)), ", ".join(self._queues)
            return f"Its tasks wait in {where}, but this runner serves only {served}: add that to its --queues."
        return None


class DispatchClaiming:
    """The claims of one session."""

    def __init__(self, settings: Settings, *, session: int) -> None:
        self._session, self._queues = session, list(settings.runner_queues)
        patterns = [read_pattern(text) for text in settings.runner_match]
        self._matching: PatternClaims | None = None
        if patterns:
            self._matching = PatternClaims(patterns, self._queues, aging_seconds=settings.aging_seconds)
        self._cursor = ClaimCursor(len(self._queues), aging_seconds=settings.aging_seconds)
        self._plain = Claims(settings, session=session)

    async def claim(self, conn: AsyncConnection, free: int) -> int:
        """Claim up to `free` tasks. Returns the number claimed."""
        if self._matching is not None:
            rows = await claim_matching_for_dispatch(conn, self._matching, session=self._session, free=free)
        else:
            rows = await claim_for_dispatch(
                conn, session=self._session, queues=self._queues, free=free, cursor=self._cursor
            )
        return len(rows)

    async def warn_if_idle(self, conn: AsyncConnection, *, log: Log) -> None:
        """Warn about every pattern that matches no task this runner could claim."""
        await self._plain.warn_if_idle(conn, log=log)


MOST_LINES = 8


# Sends these reports, and claims up to the number of free slots.
Send = Callable[[list[Outcome], int], Awaitable[Exchange]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """The database's answer, and the outcomes that it refused."""

    stepped: Exchange
    unstored: list[Outcome]


async def report_outcomes(send: Send, ended: list[Outcome], free: int, *, log: Log) -> ReportResult:
    """One round trip; if the database refuses it, halve the batch until the refused report is isolated.

    Raises when the reports are not the cause. Sending them again is then harmless.
    """
    try:
        return ReportResult(stepped=await send(ended, free), unstored=[])
    except psycopg.Error as error:
        if not ended or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", reports=len(ended), error=error)
        if len(ended) == 1:
            return await _tell_plainly(send, ended[0], free, str(error), log=log)
    middle = len(ended) // 2
    first, second = (
        await report_outcomes(send, ended[:middle], 0, log=log),
        await report_outcomes(send, ended[middle:], free, log=log),
    )
    return ReportResult(
        stepped=Exchange(
            claims=second.stepped.claims,
            refused=first.stepped.refused + second.stepped.refused,
            has_more=first.stepped.has_more or second.stepped.has_more,
            is_walking=second.stepped.is_walking,
            has_arrivals=first.stepped.has_arrivals or second.stepped.has_arrivals,
        ),
        unstored=first.unstored + second.unstored,
    )


async def _tell_plainly(send: Send, outcome: Outcome, free: int, error: str, *, log: Log) -> ReportResult:
    reason = f"the outcome could not be stored: {error}".splitlines()[0]
    plain = Outcome(key=outcome.key, epoch=outcome.epoch, kind=OutcomeKind.FAILED, reason=reason)
    try:
        return ReportResult(stepped=await send([plain], free), unstored=[])
    except psycopg.Error as again:
        if isinstance(again, psycopg.OperationalError | psycopg.InterfaceError):
            raise
        log.error("report_refused", run=outcome.key.run_id, task=outcome.key.idx, epoch=outcome.epoch, error=again)
    # If this report is not the cause, this fails as well, and nothing was decided.
    return replace(await report_outcomes(send, [], free, log=log), unstored=[outcome])


def show_finished(finished: list[Finished], *, log: Log) -> None:
    """Log a line for each ended attempt, or one for all when they are many."""
    timed_out = sum(each.outcome.kind is OutcomeKind.TIMED_OUT for each in finished)
    if timed_out:
        metrics.TIMEOUTS.labels(kind="execution").inc(timed_out)
    if len(finished) > MOST_LINES:
        log.info("finish", attempts=len(finished))
        return
    for each in finished:
        done = each.outcome
        facts = {"run": done.key.run_id, "epoch": done.epoch, "outcome": done.kind.value}
        log.info("finish", task=each.label, **facts, seconds=round(each.seconds, 3))


def show_refused(refused: list[Held], *, log: Log) -> None:
    """Log reports of attempts that were taken away; they changed nothing."""
    metrics.STALE_WRITES_REFUSED.inc(len(refused))
    metrics.CLAIMS_LOST.inc(len(refused))
    for key, epoch in refused:
        log.warning("lease_lost", run=key.run_id, task=key.idx, epoch=epoch)
