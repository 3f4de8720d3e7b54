"""finish, for the one attempt of an agent: by the API for an agent that tells it, or by whoever found what an agent left behind.

Guarded by epoch and session, so that telling it twice, or by both, is one event.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.engine.step import Stepped
from evertick.store import agents
from evertick.store.db import retry_on_deadlock


async def finish_attempt(conn: AsyncConnection, *, session: int, report: str, infra_retries: int) -> Stepped:
    """`report` is made by `step.report`. What is refused was not the session's any more, and changed nothing."""
    rows = await retry_on_deadlock(
        lambda: agents.finish(conn, session=session, reports_json=f"[{report}]", infra_retries=infra_retries)
    )
    return Stepped(
        claims=[],
        refused=[(TaskKey(row.run_id, row.idx, row.map_index), row.epoch) for row in rows if row.kind == "refused"],
        has_more=any(row.kind == "more" for row in rows),
        has_arrivals=any(row.kind == "arrived" for row in rows),
    )
