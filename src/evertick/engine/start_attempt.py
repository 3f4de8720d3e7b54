"""start: an agent begins the attempt that was submitted for it. Never two agents for one attempt, never a reassigned attempt."""

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
    "stale": LeaseLost("This attempt is no longer valid: it was declared lost, replaced, or is over."),
}


async def start_attempt(
    conn: AsyncConnection, bearer: Bearer, *, nonce: str, agent: NewAgent, lost_after: float
) -> StartedRow:
    """Repeating it with the same nonce after a lost reply returns the same reply. Raises Conflict or LeaseLost."""
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
