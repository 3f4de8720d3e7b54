"""start: an agent begins the attempt that was dispatched to it. Never two agents for one attempt, never one that was taken away."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.agent_token import Bearer
from evertick.domain.errors import Conflict, LeaseLost
from evertick.store import agents
from evertick.store.agents import NewAgent, StartedRow
from evertick.store.db import retry_on_deadlock

_REFUSALS: dict[str, Conflict | LeaseLost] = {
    "duplicate": Conflict("Another agent has started this attempt: this one must not run it."),
    "canceled": Conflict("This attempt was canceled before it started."),
    "stale": LeaseLost("This attempt is no longer its task's: it was given up, replaced, or is over."),
}


async def start_attempt(
    conn: AsyncConnection, bearer: Bearer, *, nonce: str, agent: NewAgent, lost_after: float
) -> StartedRow:
    """Asking again with the same nonce, because the answer was lost, gives the same answer. Raises Conflict or LeaseLost."""
    row = await retry_on_deadlock(
        lambda: agents.start(
            conn,
            bearer.key,
            epoch=bearer.epoch,
            session=bearer.session,
            nonce=nonce,
            agent=agent,
            lost_after=lost_after,
        )
    )
    if (refusal := _REFUSALS.get(row.verdict)) is not None:
        raise type(refusal)(str(refusal))
    return row
