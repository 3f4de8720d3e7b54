"""Gates: pools, keys and limits, their holders and their waiters."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.db.statements import all_rows, one_row, one_value, sql
from evertick.domain.attempt import TaskKey
from evertick.domain.explain import Blocked, Reason


@dataclass(frozen=True, slots=True)
class GateRow:
    gate_id: int
    kind: str
    name: str
    capacity: int
    used: int
    holders: int
    waiters: int
    version: int | None  # of an ordered key: the smallest open one
    period: float | None  # of a rate


@dataclass(frozen=True, slots=True)
class GateTask:
    """A task that holds slots of a gate, or waits for them."""

    run_id: int
    idx: int
    map_index: int
    dag: str
    task: str
    state: str
    weight: int
    since: datetime


@dataclass(frozen=True, slots=True)
class PoolSet:
    is_new: bool
    admitted: int


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


async def set_pool(conn: AsyncConnection, *, name: str, slots: int, actor: str) -> PoolSet:
    row = await one_row(conn, sql("gates", "set_pool"), {"name": name, "slots": slots, "actor": actor}, PoolSet)
    assert row is not None
    return row


async def delete_pool(conn: AsyncConnection, *, name: str, actor: str) -> str | None:
    """Why it cannot be deleted: 'unknown', 'used', or the DAG that needs it."""
    return cast("str | None", await one_value(conn, sql("gates", "delete_pool"), {"name": name, "actor": actor}))


async def admit_gated_tasks(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> GateWork:
    row = await one_row(conn, sql("gates", "tend"), {"shard": shard, "epoch": epoch, "batch": batch}, GateWork)
    assert row is not None
    return row


async def release_admissions(conn: AsyncConnection, *, shard: int, epoch: int, grace: float, batch: int) -> int:
    """The number of tasks whose admission was released."""
    params = {"shard": shard, "epoch": epoch, "grace": grace, "batch": batch}
    return int(await one_value(conn, sql("gates", "unadmit"), params))


async def reconcile(conn: AsyncConnection, *, shard: int, epoch: int, after: int, batch: int) -> GatesReconciled:
    params = {"shard": shard, "epoch": epoch, "after": after, "batch": batch}
    row = await one_row(conn, sql("gates", "reconcile"), params, GatesReconciled)
    assert row is not None
    return row


async def list_gates(conn: AsyncConnection, *, kinds: list[str], limit: int = 10_000) -> list[GateRow]:
    return await all_rows(conn, sql("gates", "list"), {"kinds": kinds, "limit": limit}, GateRow)


async def holders(conn: AsyncConnection, gate_id: int, *, limit: int = 1000) -> list[GateTask]:
    return await all_rows(conn, sql("gates", "holders"), {"gate_id": gate_id, "limit": limit}, GateTask)


async def waiters(conn: AsyncConnection, gate_id: int, *, limit: int = 1000) -> list[GateTask]:
    return await all_rows(conn, sql("gates", "waiters"), {"gate_id": gate_id, "limit": limit}, GateTask)


async def why(conn: AsyncConnection, key: TaskKey) -> list[Reason]:
    """Why a task is not running, the most binding reason first."""
    params = {"run_id": key.run_id, "idx": key.idx, "map_index": key.map_index}
    return await all_rows(conn, sql("gates", "why"), params, Reason)


async def blocked(conn: AsyncConnection, *, limit: int) -> list[Blocked]:
    """The blockers of the most work now."""
    return await all_rows(conn, sql("gates", "blocked"), {"limit": limit}, Blocked)


async def describe_pool(conn: AsyncConnection, *, name: str, description: str) -> None:
    await conn.execute(sql("gates", "describe_pool"), {"name": name, "description": description})


async def pool_descriptions(conn: AsyncConnection, names: list[str]) -> dict[str, str]:
    cursor = await conn.execute(sql("gates", "pool_descriptions"), {"names": names})
    return {cast(str, row[0]): cast(str, row[1]) for row in await cursor.fetchall()}
