"""Maintenance of a shard: due retries, timeouts, dependencies, reconciliation, alerts, and moves between shards.

Only the leader of the shard does this: each operation is one bounded batch, fenced by the leader's epoch.
"""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.db.queries import notifications, runs, schedules, shards, tasks
from evertick.db.queries import shards as shards_queries
from evertick.db.queries.notifications import AlertChange
from evertick.db.queries.runs import Admitted, Reconciled
from evertick.db.queries.schedules import DependenciesDelivered
from evertick.db.queries.shards import Moved
from evertick.db.queries.tasks import Promoted, TimedOut
from evertick.domain.errors import UserError
from evertick.domain.shards import MOST_SHARDS
from evertick.engine.verbs import as_leader


async def promote(
    conn: AsyncConnection, *, shard: int, epoch: int, batch: int, max_active_retries: int | None = None
) -> Promoted:
    """One batch. The result says when the next task is due by time, and whether some wait for the limit.

    `max_active_retries` applies per queue; None is half of the slots of the live runners that serve it.
    """
    return await as_leader(
        lambda: tasks.promote(conn, shard=shard, epoch=epoch, batch=batch, bound=max_active_retries),
        shard=shard,
        epoch=epoch,
    )


async def time_out_run(conn: AsyncConnection, *, shard: int, epoch: int, run_id: int) -> int | None:
    """The number of tasks with a stop request; None if the run is no longer over its limit, -1 if it was quarantined."""
    return await as_leader(
        lambda: runs.time_out(conn, shard=shard, epoch=epoch, run_id=run_id), shard=shard, epoch=epoch
    )


async def time_out_waits(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> TimedOut:
    """Fail one batch of the tasks that were queued longer than their queue_timeout."""
    return await as_leader(
        lambda: tasks.time_out_waits(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )


async def deliver_dependencies(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> DependenciesDelivered:
    """Deliver one batch of events."""
    return await as_leader(
        lambda: schedules.deliver_dependencies(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )


async def reconcile(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    after: tuple[int, int],
    batch: int,
    elapsed: float = 0.0,
    counts_line: bool = True,
) -> Reconciled:
    """Repair one batch. `last` is where the next batch starts; (0, 0) is the beginning.

    `elapsed` is added to the time for which a stuck run has been watched. `counts_line` also looks for tasks that are
    missing in the queue, which reads all of it.
    """
    return await as_leader(
        lambda: runs.reconcile(
            conn,
            shard=shard,
            epoch=epoch,
            after=after,
            batch=batch,
            elapsed=elapsed,
            counts_line=counts_line,
        ),
        shard=shard,
        epoch=epoch,
    )


async def skip_one(conn: AsyncConnection, *, shard: int, epoch: int, after: tuple[int, int]) -> tuple[int, int]:
    """Quarantine the next run, whose check alone exceeds the time limit. Returns where to continue."""
    return await as_leader(lambda: runs.skip_one(conn, shard=shard, epoch=epoch, after=after), shard=shard, epoch=epoch)


async def admit(conn: AsyncConnection, *, shard: int, epoch: int) -> Admitted:
    """Start queued runs that were passed over while they were locked."""
    return await as_leader(lambda: runs.admit(conn, shard=shard, epoch=epoch), shard=shard, epoch=epoch)


async def raise_alerts(
    conn: AsyncConnection, *, shard: int, epoch: int, unfired_seconds: float, batch: int
) -> list[AlertChange]:
    """The alerts that were raised or resolved."""
    return await as_leader(
        lambda: notifications.raise_due(conn, shard=shard, epoch=epoch, unfired_seconds=unfired_seconds, batch=batch),
        shard=shard,
        epoch=epoch,
    )


async def rebalance_shard(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Moved:
    return await as_leader(
        lambda: shards.rebalance_shard(conn, shard=shard, epoch=epoch, batch=batch), shard=shard, epoch=epoch
    )


async def set_shards(conn: AsyncConnection, *, shards: int, actor: str) -> None:
    """Effective from now on. Idempotent: repeating it only checks all rows once more."""
    if not 1 <= shards <= MOST_SHARDS:
        raise UserError(f"The number of shards must be from 1 to {MOST_SHARDS}; it is {shards}.")
    await shards_queries.set_shards(conn, shards=shards, actor=actor, if_never_chosen=False)


async def choose_shards(conn: AsyncConnection, *, shards: int, actor: str) -> bool:
    """For a database whose number of shards was never set. Returns whether that was the case."""
    return await shards_queries.set_shards(conn, shards=shards, actor=actor, if_never_chosen=True)
