"""How a runner of a remote executor claims: like any other runner, except that the tasks become queued for it."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.patterns import read_pattern
from evertick.engine.claim_cursor import ClaimCursor
from evertick.engine.claim_matching import Matching
from evertick.engine.dispatch import claim_for_dispatch, claim_matching_for_dispatch
from evertick.services.claiming import Claiming
from evertick.services.events import Log


class DispatchClaiming:
    """The claims of one session."""

    def __init__(self, settings: Settings, *, session: int) -> None:
        self._session, self._queues = session, list(settings.runner_queues)
        patterns = [read_pattern(text) for text in settings.runner_match]
        self._matching: Matching | None = None
        if patterns:
            self._matching = Matching(patterns, self._queues, aging_seconds=settings.aging_seconds)
        self._cursor = ClaimCursor(len(self._queues), aging_seconds=settings.aging_seconds)
        self._plain = Claiming(settings, session=session)

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
