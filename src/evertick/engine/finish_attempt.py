"""finish, for the one attempt of an agent: by the API when the agent reports, or by the runner that finds its outcome file.

Guarded by epoch and session, so that repeated or concurrent reports are one event.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.engine.step import Stepped
from evertick.store import agents
from evertick.store.db import retry_on_deadlock


async def finish_attempt(conn: AsyncConnection, *, session: int, report: str, infra_retries: int) -> Stepped:
    """`report` is created by `step.report`. A rejected report was no longer the session's own, and changed nothing."""
    rows = await retry_on_deadlock(
        lambda: agents.finish(conn, session=session, reports_json=f"[{report}]", infra_retries=infra_retries)
    )
    return Stepped(
        claims=[],
        refused=[(TaskKey(row.run_id, row.idx, row.map_index), row.epoch) for row in rows if row.kind == "refused"],
        has_more=any(row.kind == "more" for row in rows),
        has_arrivals=any(row.kind == "arrived" for row in rows),
    )
