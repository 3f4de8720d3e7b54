"""Pools as users set them, and the leader's work on gates: admit waiting tasks, release admissions that no runner can
use, and recount the used slots (V6).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.queries import gates
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.gates import MOST_SLOTS, check_pool_name
from evertick.domain.errors import Conflict, NotFound, PreconditionFailed, UserError
from evertick.engine.verbs import did_you_mean, leader_verb


@dataclass(frozen=True, slots=True)
class PoolSet:
    is_new: bool
    admitted: int
    is_stale: bool


@dataclass(frozen=True, slots=True)
class GateWork:
    """`next_opening` is when the next slot of a rate becomes free for a waiting task."""

    admitted: int
    next_opening: datetime | None


@dataclass(frozen=True, slots=True)
class GatesReconciled:
    """`last_gate_id` is where to continue, None to start over. `drifted`: gates whose count was wrong."""

    last_gate_id: int | None
    drifted: int
    admitted: int


@sql_function
async def _set_pool(conn: AsyncConnection, *, name: str, slots: int, actor: Actor, revision: str | None) -> PoolSet: ...


async def set_pool(
    conn: AsyncConnection, *, name: str, slots: int, actor: Actor, revision: str | None = None
) -> PoolSet:
    """Create a pool, or change its slots; with `revision` only if it has that one. Below the current use, running tasks
    finish and none starts until slots are free."""
    if wrong := check_pool_name(name):
        raise UserError(f"{name!r} is not a valid name for a pool: {wrong}.")
    if not 0 <= slots <= MOST_SLOTS:
        raise UserError(f"Pool {name!r} cannot have {slots:,} slots: use 0 (closed) to {MOST_SLOTS:,}.")
    done = await _set_pool(conn, name=name, slots=slots, actor=actor, revision=revision)
    if done.is_stale:
        raise _stale(name)
    return done


@sql_function
async def _delete_pool(conn: AsyncConnection, *, name: str, actor: Actor, revision: str | None) -> str | None:
    """Why it cannot be deleted: 'unknown', 'used', 'stale', or the DAG that needs it."""


async def delete_pool(conn: AsyncConnection, *, name: str, actor: Actor, revision: str | None = None) -> None:
    why = await _delete_pool(conn, name=name, actor=actor, revision=revision)
    if why is None:
        return
    if why == "stale" and revision is not None:
        raise _stale(name)
    if why == "unknown":
        names = [pool.name for pool in await gates.list_gates(conn, kinds=["pool"])]
        hint = did_you_mean(name, names, "List pools with `evertick pools list`.")
        raise NotFound(f"There is no pool {name!r}. {hint}")
    if why == "used":
        raise Conflict(
            f"Pool {name!r} is in use: `evertick pools list` shows how many slots. Close it with 0 slots first."
        )
    raise Conflict(f"DAG {why!r} needs pool {name!r}. Change the DAG first, or close the pool with 0 slots.")


def _stale(name: str) -> PreconditionFailed:
    return PreconditionFailed(f"Pool {name!r} has changed. Read it again and repeat the change.")


@leader_verb
async def admit_gated_tasks(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> GateWork:
    """The admissions that other transactions could not finish, and slots that became free with time."""


@leader_verb
async def release_admissions(conn: AsyncConnection, *, shard: int, epoch: int, grace: float, limit: int) -> int:
    """Available tasks that no live runner can claim release their slots. Returns their number."""


@leader_verb
async def reconcile_gates(conn: AsyncConnection, *, shard: int, epoch: int, after: int, limit: int) -> GatesReconciled:
    """Recount one batch of the gates, repair them, and admit tasks that were missed."""
