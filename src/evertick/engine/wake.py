"""wake: the leader's work on due deferred tasks. It starts runs of other DAGs, computes times of day, and
resumes tasks whose wait is over: by time, by an event, by the end of another run, or to poll again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.child_params import fill_params
from evertick.domain.errors import UserError
from evertick.domain.params import check_params
from evertick.domain.waiting import clock_instant
from evertick.engine.fenced import as_leader
from evertick.engine.trigger import find_dag
from evertick.store import deferrals
from evertick.store.deferrals import ChildDue, ClockDue, Woken

# The limit on the length of a chain of runs that triggered each other. It ends cycles of DAGs.
MOST_ABOVE = 10


async def wake(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Woken:
    """One batch of the due waits."""
    due = await deferrals.children_due(conn, shard=shard, batch=batch)
    for each in due:
        await _start(conn, each, shard=shard, epoch=epoch)
    read = await _read_clocks(conn, shard=shard, epoch=epoch, batch=batch)
    done = await as_leader(
        lambda: deferrals.wake_waits(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )
    return replace(done, looked_at=done.looked_at + len(due) + read)


async def _read_clocks(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> int:
    """Times of day become instants, by the rules of schedules. One that fails, because its zone is no longer known here, does
    not affect the others."""
    due = await deferrals.clocks_due(conn, shard=shard, batch=batch)
    if due:
        instants = [(each, _instant_of(each)) for each in due]
        await as_leader(
            lambda: deferrals.set_clocks(conn, instants, shard=shard, epoch=epoch), shard=shard, epoch=epoch
        )
    return len(due)


def _instant_of(due: ClockDue) -> datetime | str:
    try:
        return clock_instant(due.at, due.timezone, due.since)
    except UserError as error:
        return str(error)


async def _start(conn: AsyncConnection, due: ChildDue, *, shard: int, epoch: int) -> None:
    """Start one task's run, or record the reason why it cannot start."""
    dag_id, params, reason = None, {}, None
    try:
        if due.depth >= MOST_ABOVE:
            raise UserError(f"trigger depth limit ({MOST_ABOVE}) reached; check for a cycle between DAGs.")
        row, spec = await find_dag(conn, due.dag)
        given = fill_params(due.params, due.given, results=due.results, own=due.own)
        params = dict(check_params(spec.params, given))
        dag_id = row.dag_id
    except UserError as error:
        reason = f"cannot start {due.dag}: {error}"
    await as_leader(
        lambda: deferrals.start_child(conn, due, shard=shard, epoch=epoch, dag_id=dag_id, params=params, reason=reason),
        shard=shard,
        epoch=epoch,
    )
