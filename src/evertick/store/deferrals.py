"""Tasks that wait without a slot: what is due of them, and the runs that they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class ChildDue:
    """A task that is about to start a run. `depth`: how many runs above it started each other."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    dag: str
    params: dict[str, object]
    depth: int
    parent_dag: str


async def children_due(conn: AsyncConnection, *, shard: int, batch: int) -> list[ChildDue]:
    return await all_rows(conn, sql("deferrals", "children_due"), {"shard": shard, "batch": batch}, ChildDue)


async def start_child(
    conn: AsyncConnection,
    due: ChildDue,
    *,
    shard: int,
    epoch: int,
    dag_id: int | None,
    params: Mapping[str, object],
    reason: str | None,
) -> int | None:
    """The run; None when the task waits no more, or fails for `reason`."""
    given = {
        "shard": shard,
        "epoch": epoch,
        "run_id": due.run_id,
        "idx": due.idx,
        "map_index": due.map_index,
        "task_epoch": due.epoch,
        "dag_id": dag_id,
        "params": Json(dict(params)),
        "depth": due.depth + 1,
        "reason": reason,
    }
    return cast("int | None", await one_value(conn, sql("deferrals", "start_child"), given))


async def wake_parents(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> int:
    given = {"shard": shard, "epoch": epoch, "batch": batch}
    return cast(int, await one_value(conn, sql("deferrals", "wake_parents"), given))
