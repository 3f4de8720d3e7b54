"""Stand-ins for agents: what an agent's start does, in SQL, for tests that need no agent."""

from __future__ import annotations

from typing import LiteralString

from psycopg import AsyncConnection

from evertick.db.queries.runners import QueuedRow
from evertick.db.queries.tasks import ExchangeRow

START: LiteralString = """
with begun as (
    update task set state = 'running', started_at = clock()
    where session = %(session)s and epoch = %(epoch)s and state = 'queued' and request is null
    returning run_id, idx, map_index, epoch, session
), registered as (
    insert into runner (session, runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots,
                        heartbeat_at, lost_after_seconds, started_at, executor)
    select session, 'agent', '', 'far', '', '', 0, 0, 0, '{}', 1, clock(), 90, clock(), 'far' from begun
), leased as (
    insert into lease (session, run_id, idx, map_index, epoch) select session, run_id, idx, map_index, epoch from begun
)
update dispatch d set started_at = clock(), nonce = 'n' from begun b where d.session = b.session returning d.session
"""


async def begin(conn: AsyncConnection, *, session: int, epoch: int) -> bool:
    """Whether it may run."""
    cursor = await conn.execute(START, {"session": session, "epoch": epoch})
    return await cursor.fetchone() is not None


def as_claim(row: QueuedRow) -> ExchangeRow:
    """What its agent reports about."""
    return ExchangeRow("claim", row.run_id, row.idx, row.map_index, row.epoch, 1, 0, None, "", None, 0, 0)
