"""What an API process remembers of the sessions over HTTPS: their queues, and how far they have read them.

It may be lost at any time, and another API process may serve the next request.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import runner_tokens
from evertick.db.queries.runner_tokens import JoinedRow
from evertick.domain.errors import Unauthenticated
from evertick.runner.exchange import Claims

MOST_SESSIONS = 10_000


@dataclass(frozen=True, slots=True)
class JoinedSession:
    row: JoinedRow
    claims: Claims


class JoinedSessions:
    """What a session joined with never changes; the least recently used is dropped."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: OrderedDict[int, JoinedSession] = OrderedDict()

    def known(self, session: int) -> JoinedSession | None:
        """Without the database."""
        return self._known.get(session)

    async def get(self, conn: AsyncConnection, session: int) -> JoinedSession:
        if (found := self._known.get(session)) is not None:
            self._known.move_to_end(session)
            return found
        row = await runner_tokens.joined(conn, session)
        if row is None:
            raise Unauthenticated("No runner joined with this session.")
        claims = Claims.of(self._settings, session=session, queues=row.queues, match=row.match)
        found = self._known[session] = JoinedSession(row, claims)
        while len(self._known) > MOST_SESSIONS:
            self._known.popitem(last=False)
        return found
