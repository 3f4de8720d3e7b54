"""How a runner claims: from all of its queues or only tasks that match its patterns, and periodically the longest
waiting first."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.patterns import Pattern, address_of, matches, read_pattern
from evertick.engine.claim_cursor import ClaimCursor
from evertick.engine.claim_matching import Matching, step_matching
from evertick.engine.step import Stepped, step
from evertick.services.events import Log
from evertick.store import queues

MOST_PUBLISHED = 200_000


class Claiming:
    """The claims of one session."""

    def __init__(self, settings: Settings, *, session: int) -> None:
        self._session, self._infra_retries = session, settings.infra_retries
        self._queues = list(settings.runner_queues)
        self._patterns = [read_pattern(text) for text in settings.runner_match]
        self._matching: Matching | None = None
        if self._patterns:
            self._matching = Matching(self._patterns, self._queues, aging_seconds=settings.aging_seconds)
        self._cursor = ClaimCursor(len(self._queues), aging_seconds=settings.aging_seconds)

    async def step(self, conn: AsyncConnection, reports: list[str], free: int) -> Stepped:
        """Report ended attempts, and claim up to `free` tasks."""
        if self._matching is not None:
            return await step_matching(
                conn,
                self._matching,
                session=self._session,
                reports=reports,
                free=free,
                infra_retries=self._infra_retries,
            )
        return await step(
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
        published = await queues.published(conn, limit=MOST_PUBLISHED)
        for pattern in self._patterns:
            if problem := self._problem_of(pattern, published):
                log.warning("matches_nothing", pattern=pattern.text, message=problem)

    def _problem_of(self, pattern: Pattern, published: list[queues.RoutedTask]) -> str | None:
        found = {each.queue for each in published if matches(pattern, address_of(each.dag, each.task))}
        if not found:
            return "No published task matches it, so this runner claims nothing by it until one is published."
        if found.isdisjoint(self._queues):
            where, served = ", ".join(sorted(found)), ", ".join(self._queues)
            return f"Its tasks wait in {where}, but this runner serves only {served}: add that to its --queues."
        return None
