"""Pools as users set them, and the leader's work on gates: admit waiting tasks, release admissions that no runner can
use, and recount the used slots (V6).
"""

from __future__ import annotations

import difflib

from psycopg import AsyncConnection

from evertick.db.connect import retry_on_deadlock
from evertick.db.queries import gates
from evertick.db.queries.gates import GatesReconciled, GateWork, PoolSet
from evertick.domain.dags.gates import MOST_SLOTS, check_pool_name
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.engine.verbs import as_leader


async def set_pool(conn: AsyncConnection, *, name: str, slots: int, actor: str) -> PoolSet:
    """Create a pool, or change its slots. Below the current use, running tasks finish and none starts until slots are free."""
    if wrong := check_pool_name(name):
        raise UserError(f"{name!r} is not a valid name for a pool: {wrong}.")
    if not 0 <= slots <= MOST_SLOTS:
        raise UserError(f"Pool {name!r} cannot have {slots:,} slots: use 0 (closed) to {MOST_SLOTS:,}.")
    return await retry_on_deadlock(lambda: gates.set_pool(conn, name=name, slots=slots, actor=actor))


async def delete_pool(conn: AsyncConnection, *, name: str, actor: str) -> None:
    why = await retry_on_deadlock(lambda: gates.delete_pool(conn, name=name, actor=actor))
    if why is None:
        return
    if why == "unknown":
        names = [pool.name for pool in await gates.list_gates(conn, kinds=["pool"])]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " List pools with `evertick pools list`."
        raise NotFound(f"There is no pool {name!r}.{hint}")
    if why == "used":
        raise Conflict(
            f"Pool {name!r} is in use: `evertick pools list` shows how many slots. Close it with 0 slots first."
        )
    raise Conflict(f"DAG {why!r} needs pool {name!r}. Change the DAG first, or close the pool with 0 slots.")


async def admit_gated_tasks(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> GateWork:
    """For the leader: the admissions that other transactions could not finish, and slots that became free with time."""
    return await as_leader(
        lambda: gates.admit_gated_tasks(conn, shard=shard, epoch=epoch, batch=batch),
        shard=shard,
        epoch=epoch,
    )


async def release_admissions(conn: AsyncConnection, *, shard: int, epoch: int, grace: float, batch: int) -> int:
    """For the leader: available tasks that no live runner can claim release their slots. Returns their number."""
    return await as_leader(
        lambda: gates.release_admissions(conn, shard=shard, epoch=epoch, grace=grace, batch=batch),
        shard=shard,
        epoch=epoch,
    )


async def reconcile_gates(conn: AsyncConnection, *, shard: int, epoch: int, after: int, batch: int) -> GatesReconciled:
    """For the leader: recount one batch of the gates, repair them, and admit tasks that were missed."""
    return await as_leader(
        lambda: gates.reconcile(conn, shard=shard, epoch=epoch, after=after, batch=batch), shard=shard, epoch=epoch
    )
