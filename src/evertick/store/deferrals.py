"""Tasks that wait without a slot: the due waits, and the runs that they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.store.rows import all_rows, one_row, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True)
class ChildDue:
    """A task that is about to start a run. `depth`: the length of the chain of runs that triggered each other above it. `given`:
    params to take from its `own` run's params, or from `results` of upstream tasks."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    dag: str
    params: dict[str, object]
    depth: int
    parent_dag: str
    given: dict[str, object]
    own: dict[str, object]
    results: dict[str, object]


@dataclass(frozen=True, slots=True)
class ClockDue:
    """A task that waits for a time of day. `since`: the logical date of its run."""

    run_id: int
    idx: int
    map_index: int
    epoch: int
    at: str
    timezone: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Woken:
    """How many waits were checked, how many of them were quarantined, and when the next is due."""

    looked_at: int
    refused: int
    next_wake: datetime | None


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
    """The run; None when the task no longer waits, or fails for `reason`."""
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


async def clocks_due(conn: AsyncConnection, *, shard: int, batch: int) -> list[ClockDue]:
    return await all_rows(conn, sql("deferrals", "clocks_due"), {"shard": shard, "batch": batch}, ClockDue)


async def set_clocks(
    conn: AsyncConnection, instants: Sequence[tuple[ClockDue, datetime | str]], *, shard: int, epoch: int
) -> None:
    """The instant of each, or the reason why it has none."""
    rows = [
        {
            "run_id": due.run_id,
            "idx": due.idx,
            "map_index": due.map_index,
            "epoch": due.epoch,
            "wake_at": None if isinstance(at, str) else at.isoformat(),
            "reason": at if isinstance(at, str) else None,
        }
        for due, at in instants
    ]
    await conn.execute(sql("deferrals", "set_clocks"), {"shard": shard, "epoch": epoch, "instants": Json(rows)})


async def wake_waits(conn: AsyncConnection, *, shard: int, epoch: int, batch: int) -> Woken:
    given = {"shard": shard, "epoch": epoch, "batch": batch}
    done = await one_row(conn, sql("deferrals", "wake_waits"), given, Woken)
    assert done is not None
    return done
